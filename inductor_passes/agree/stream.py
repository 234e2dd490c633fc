"""A graph's launches in program order: all that ranks which run one program are sure to share.

Sizes are left out of what identifies a stream, because a rank's batch is its own; so are names of groups,
numbers of graphs and names of files. A launch is known by what it does, on which of the stream's groups,
and by the functions and lines of the program that lead to it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.records import ONE_SIDED

VERSION = 4


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that moves data: its name in this process and its global ranks."""

    name: str
    ranks: tuple[int, ...]

    @property
    def id(self) -> str:
        """The same on every rank of the group, and of no other group of the job."""
        digest = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]
        return f"{self.name}/{digest}"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of the program.

    ``what``: operation, reduction and type, such as ``all_reduce sum float32``. ``group``: which of the
    stream's groups, by number. ``path``: the program's lines that lead to it, outermost first, each
    ``function:line``; empty where nobody noted them. ``payload_bytes``: of this rank's
    input; None if it is symbolic or need not be equal on all ranks. ``line``: for people. ``files``: of ``path``,
    without folders; no part of what the launch is known by, because ranks may name them otherwise.
    """

    what: str
    group: int
    path: tuple[str, ...] = ()
    payload_bytes: int | None = None
    line: str = ""
    files: tuple[str, ...] = field(default=(), compare=False)

    @property
    def is_one_sided(self) -> bool:
        """Return whether another rank's launch stands against it, instead of the same one."""
        return self.what.split()[0] in ONE_SIDED

    def text(self) -> str:
        """For an error message."""
        kind, *rest = self.what.split()
        size = [] if self.payload_bytes is None else [f"of {self.payload_bytes} bytes"]
        return " ".join([kind, *rest[:-1], *size, *rest[-1:]])


@dataclass(frozen=True, slots=True)
class Stream:
    """The launches of one graph, in program order, on groups of at least two real ranks.

    ``backward``: whether it is a backward graph. ``partial``: whether the compiled frame goes on after the graph, or went on
    before it, in Python (a graph break). ``root``: the function that was compiled, ``name (file:first-last)``. ``graph``: the graph's name in
    this process, for people. ``options``: a digest of what the passes were told, and of the types that they may
    narrow launches to. ``callers``: ``function:line`` of what was
    on this rank's stack when the graph was compiled; None where nobody noted them. No other rank knows them.
    ``behind_python``: whether one of them is a function that this rank leaves to Python: then launches that no graph has
    may come before these. ``is_joint``: whether it is of forward and backward together, before they are two graphs;
    ``joint``: key of the stream of that graph, if it was cut into parts: launches are of the parts then.
    """

    groups: tuple[Group, ...]
    launches: tuple[Launch, ...]
    backward: bool = False
    partial: bool = False
    root: str = ""
    graph: str = ""
    options: str = ""
    behind_python: bool = False
    is_joint: bool = False
    joint: str = ""
    callers: Collection[str] | None = field(default=None, compare=False)

    @property
    def content(self) -> str:
        """A digest of what is launched, wherever it stands in the program."""
        return digest(
            [
                self.options,
                self.backward,
                self.is_joint,
                self.joint,
                [len(g.ranks) for g in self.groups],
            ]
            + [[launch.what, launch.group] for launch in self.launches]
        )

    @property
    def key(self) -> str:
        """A digest of what is launched and of where it stands: equal on ranks that run one program."""
        return digest([self.content, *(launch.path for launch in self.launches)])

    @property
    def is_one_sided(self) -> bool:
        """Return whether any launch is a send or a receive: ranks then launch differently on purpose."""
        return any(launch.is_one_sided for launch in self.launches)

    @property
    def gathers(self) -> bool:
        """Return whether any launch gathers shards."""
        return any(launch.what.startswith("all_gather") for launch in self.launches)

    def on(self, number: int) -> list[Launch]:
        """The launches on one of the stream's groups that its ranks share."""
        return [x for x in self.launches if x.group == number and not x.is_one_sided]

    def is_of(self, root: str) -> bool:
        """Return whether a function was compiled for this stream, or holds one of its launches."""
        return self.root == root or any(True for _ in self._calls(root))

    def may_be_in_place_of(self, root: str, callers: Collection[str]) -> bool:
        """Return whether ranks may run this stream for a call of a function that this rank makes now.

        ``callers``: ``function:line`` of what is on the stack. What the stream calls from elsewhere is another call.
        """
        return self.root == root or any(
            not at or launch.path[at - 1] in callers for launch, at in self._calls(root)
        )

    def is_called_from(self, root: str) -> bool:
        """Return whether a function was on the stack when this was compiled."""
        return any(_holds(root, "", caller) for caller in self.callers or ())

    def _calls(self, root: str) -> Iterator[tuple[Launch, int]]:
        """Launches of a function, and where it stands in their paths."""
        for launch in self.launches:
            steps = itertools.zip_longest(launch.files, launch.path, fillvalue="")
            yield from ((launch, at) for at, step in enumerate(steps) if _holds(root, *step))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "version": VERSION,
            "groups": [[g.name, list(g.ranks)] for g in self.groups],
            "launches": [
                [x.what, x.group, list(x.path), x.payload_bytes, x.line, list(x.files)]
                for x in self.launches
            ],
            "backward": self.backward,
            "partial": self.partial,
            "root": self.root,
            "graph": self.graph,
            "options": self.options,
            "behind_python": self.behind_python,
            "is_joint": self.is_joint,
            "joint": self.joint,
        }

    @classmethod
    def from_json(cls, data: Any) -> Stream:
        """Inverse of ``to_json``. Raises ValueError for anything else."""
        try:
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r}")
            return cls(
                tuple(
                    Group(str(name), tuple(int(r) for r in ranks)) for name, ranks in data["groups"]
                ),
                tuple(
                    Launch(
                        str(what),
                        int(group),
                        tuple(str(frame) for frame in path),
                        None if payload is None else int(payload),
                        str(line),
                        tuple(str(file) for file in files),
                    )
                    for what, group, path, payload, line, files in data["launches"]
                ),
                bool(data["backward"]),
                bool(data["partial"]),
                str(data["root"]),
                str(data["graph"]),
                str(data["options"]),
                bool(data["behind_python"]),
                bool(data["is_joint"]),
                str(data["joint"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no stream of launches: {error}") from error


def shares_launch(one: Stream, other: Stream) -> bool:
    """Return whether both hold the same launch of the program, be it seen from further outside or inside."""
    return any(True for _ in _shared(one, other))


def may_meet(one: Stream, other: Stream) -> bool:
    """Return whether ranks may run the one while others run the other, for the same launches of the program.

    So it is if they share a launch and one of them is part of what Python runs in between (a graph
    break), or one was compiled from further inside. Two whole frames of one function, as of training and
    evaluation, are two different calls.
    """
    broken = one.partial or other.partial
    return any(
        broken or (mine != theirs and () not in (mine, theirs))
        for mine, theirs in _shared(one, other)
    )


def _shared(one: Stream, other: Stream) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Paths of launches that both hold, in the one and in the other."""
    # The halves of a joint graph stand for it. It stands for none, but another may be run in its place.
    if other.is_joint or (one.backward != other.backward and not one.is_joint):
        return
    mine: dict[str, set[tuple[str, ...]]] = {}
    for launch in one.launches:
        mine.setdefault(launch.what, set()).add(launch.path)
    for what, path in {(launch.what, launch.path): None for launch in other.launches}:
        for own in mine.get(what, ()):
            if _is_end(own, path) and not _is_called_elsewhere(one, own, path):
                yield own, path


def _is_called_elsewhere(one: Stream, own: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Return whether another call than that in ``path`` leads to a launch of ``one``, seen from further inside.

    A function of a library that is compiled by itself, because its caller runs in Python, stands in all programs that call
    it. With a graph break of its own it may come to stand in the place of the other call later.
    """
    at = len(path) - len(own) - 1
    if not own or at < 0 or one.partial or one.callers is None:
        return False
    function = path[at].rpartition(":")[0]
    return all(caller.rpartition(":")[0] != function for caller in one.callers)


def is_same(one: Stream, other: Stream) -> bool:
    """Return whether both are the same launches, seen from further outside or inside."""
    if one.content != other.content or len(one.launches) != len(other.launches):
        return False
    pairs = [(a.path, b.path) for a, b in zip(one.launches, other.launches, strict=True)]
    return all(
        _is_end(mine, theirs)
        and not _is_called_elsewhere(one, mine, theirs)
        and not _is_called_elsewhere(other, theirs, mine)
        for mine, theirs in pairs
    )


def first_difference(mine: Sequence[Launch], theirs: Sequence[Launch]) -> int | None:
    """Return the index at which two sequences on one group part; None if one is the beginning of the other."""
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a.what != b.what:
            return i
        if None not in (a.payload_bytes, b.payload_bytes) and a.payload_bytes != b.payload_bytes:
            return i
    return None


_ROOT = re.compile(r"(?P<function>.+) \((?P<file>.+):(?P<first>\d+)-(?P<last>\d+)\)")


@functools.lru_cache(4096)
def _holds(root: str, file: str, line: str) -> bool:
    """Return whether ``function:line`` of a file, "" if nobody noted it, is in a function named as ``name (file:first-last)``."""
    name, _, number = line.rpartition(":")
    found = _ROOT.fullmatch(root)
    if found is None or found["function"] != name or file not in ("", found["file"]):
        return False
    return int(found["first"]) <= int(number) <= int(found["last"])


def _is_end(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether the shorter path is the end of the longer; a path that nobody noted is the end of any."""
    length = min(len(one), len(other))
    return length == 0 or one[-length:] == other[-length:]


def digest(value: object) -> str:
    """A short name of plain JSON, the same in every process."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]
