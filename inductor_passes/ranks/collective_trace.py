"""Read a graph's collectives off its nodes, in program order.

Sizes are left out of what identifies a trace, because a rank's batch is its own; so are names of
groups, numbers of graphs and names of files. A launch is known by what it does, on which of the
trace's groups, and by the functions and lines of the program that lead to it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import (
    MEMBERS,
    dtype_name,
    group_name,
    input_tensors,
    is_coalesced,
    is_launch,
    kind,
    launch_in_parts,
    payload_bytes,
    reduce_op,
)
from inductor_passes.graph.printing import frames_of, user_line
from inductor_passes.records import ONE_SIDED, OWN_SHARES, restored
from inductor_passes.torch_compat import c10d, dynamo

VERSION = 5


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

    ``what``: operation, reduction and type, such as ``all_reduce sum float32``. ``group``: which of
    the trace's groups, by number. ``path``: the program's lines that lead to it, outermost first,
    each ``function:line``; empty where nobody noted them. ``payload_bytes``: of this rank's input;
    None if it is symbolic or need not be equal on all ranks. ``line``: for people. ``files``: of
    ``path``, without folders; no part of what the launch is known by, because ranks may name them
    otherwise.
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
class CollectiveTrace:
    """Hold the collective trace of one graph: its launches, in program order.

    Only launches on groups of at least two real ranks count.

    ``backward``: whether it is a backward graph.
    ``partial``: whether the compiled frame continues in Python after the graph, or ran in Python
        before it (a graph break).
    ``root``: the function that was compiled, ``name (file:first-last)``.
    ``graph``: the graph's name in this process, for people.
    ``options``: a digest of the passes' options, and of the types that they may narrow launches to.
    ``callers``: ``function:line`` of this rank's stack when it compiled the graph; None where they
        were not recorded. No other rank knows them.
    ``behind_python``: whether one of the callers is a function that this rank runs in eager
        fallback. Launches that are in no graph may then come before these.
    ``is_joint``: whether it is of forward and backward together, before they are two graphs.
    ``joint``: key of the joint graph's trace, if that graph was split into chunks. The launches
        are then of the chunks.
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
        """A digest of what is launched and of where it stands: equal on ranks that run one
        program.
        """
        return digest([self.content, *(launch.path for launch in self.launches)])

    @property
    def is_one_sided(self) -> bool:
        """Return whether any launch is a send or a receive: ranks then launch differently on
        purpose.
        """
        return any(launch.is_one_sided for launch in self.launches)

    @property
    def gathers(self) -> bool:
        """Return whether any launch gathers shards."""
        return any(launch.what.startswith("all_gather") for launch in self.launches)

    def on(self, number: int) -> list[Launch]:
        """The launches on one of the trace's groups that its ranks share."""
        return [x for x in self.launches if x.group == number and not x.is_one_sided]

    def is_of(self, root: str) -> bool:
        """Return whether a function was compiled for this trace, or holds one of its launches."""
        return self.root == root or any(True for _ in self._calls(root))

    def may_be_in_place_of(self, root: str, callers: Collection[str]) -> bool:
        """Return whether ranks may run this trace for a call of a function that this rank makes
        now.

        ``callers``: ``function:line`` of what is on the stack. What the trace calls from elsewhere
        is another call.
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
        """Plain JSON types, without what no other rank knows."""
        return {"version": VERSION, **dataclasses.asdict(replace(self, callers=None))}

    @classmethod
    def from_json(cls, data: Any) -> CollectiveTrace:
        """Inverse of ``to_json``. Raises ValueError for anything else."""
        try:
            if data["version"] != VERSION:
                raise ValueError(f"version {data['version']!r}")
            found: CollectiveTrace = restored(cls, data)
            return found
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"no trace of launches: {error}") from error


def packed(values: list[Any]) -> str:
    """JSON as a short text."""
    return urlsafe_b64encode(zlib.compress(json.dumps(values).encode())).decode()


def unpacked(text: str) -> Any:
    """Inverse of ``packed``. Raises ValueError for anything else."""
    try:
        return json.loads(zlib.decompress(urlsafe_b64decode(text)))
    except (zlib.error, RecursionError) as error:
        raise ValueError(str(error)) from error


def shares_launch(
    one: CollectiveTrace, other: CollectiveTrace, *, whoever_calls: bool = False
) -> bool:
    """Return whether both hold the same launch of the program, be it seen from further outside
    or inside.

    ``whoever_calls``: also if all calls of ``other`` so far came from elsewhere.
    """
    return any(True for _ in _shared(one, other, whoever_calls))


def may_meet(one: CollectiveTrace, other: CollectiveTrace, *, whoever_calls: bool = False) -> bool:
    """Return whether ranks may run the one while others run the other, for the same launches of the
    program.

    So it is if they share a launch and one of them is part of what Python runs in between (a graph
    break), or one was compiled from further inside. Two whole frames of one function, as of
    training and evaluation, are two different calls. ``whoever_calls``: as ``shares_launch`` has
    it.
    """
    broken = one.partial or other.partial
    return any(
        broken or (mine != theirs and () not in (mine, theirs))
        for mine, theirs in _shared(one, other, whoever_calls)
    )


def _shared(
    one: CollectiveTrace, other: CollectiveTrace, whoever_calls: bool
) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Paths of launches that both hold, in the one and in the other."""
    # The halves of a joint graph stand for it. It stands for none, but another may be run in its
    # place.
    if other.is_joint or (one.backward != other.backward and not one.is_joint):
        return
    mine: dict[str, set[tuple[str, ...]]] = {}
    for launch in one.launches:
        mine.setdefault(launch.what, set()).add(launch.path)
    for what, path in {(launch.what, launch.path): None for launch in other.launches}:
        for own in mine.get(what, ()):
            if not _is_end(own, path) or _is_called_elsewhere(one, own, path):
                continue
            # ``one`` is compiled for the call that is made now. ``other`` is older, and its code
            # runs for any later call that its guards accept.
            if whoever_calls or not _is_called_elsewhere(other, path, own):
                yield own, path


def _is_called_elsewhere(one: CollectiveTrace, own: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Return whether ``one`` reaches its launch through another call than the one in ``path``.

    ``own`` is the launch's path in ``one``, seen from further inside. Dynamo compiles a library
    function by itself if its caller runs in Python. All programs that call the function then have
    its graph. If the function has a graph break of its own, it may later run for the other call
    too; the answer is then False.
    """
    at = len(path) - len(own) - 1
    if not own or at < 0 or one.partial or one.callers is None:
        return False
    function = path[at].rpartition(":")[0]
    return all(caller.rpartition(":")[0] != function for caller in one.callers)


def is_same(one: CollectiveTrace, other: CollectiveTrace) -> bool:
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
    """Return the index at which two sequences on one group part; None if one is the beginning of
    the other.
    """
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a.what != b.what:
            return i
        if None not in (a.payload_bytes, b.payload_bytes) and a.payload_bytes != b.payload_bytes:
            return i
    return None


_ROOT = re.compile(r"(?P<function>.+) \((?P<file>.+):(?P<first>\d+)-(?P<last>\d+)\)")


@functools.lru_cache(4096)
def _holds(root: str, file: str, line: str) -> bool:
    """Return whether ``function:line`` of a file, "" if nobody noted it, is in a function named
    as ``name (file:first-last)``.
    """
    name, _, number = line.rpartition(":")
    found = _ROOT.fullmatch(root)
    if found is None or found["function"] != name or file not in ("", found["file"]):
        return False
    return int(found["first"]) <= int(number) <= int(found["last"])


def _is_end(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Return whether the shorter path is the end of the longer; a path that nobody noted is the
    end of any.
    """
    length = min(len(one), len(other))
    return length == 0 or one[-length:] == other[-length:]


def digest(value: object) -> str:
    """A short name of plain JSON, the same in every process."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


PROGRAM = "program"  # a plan's text: the program's own launches in the program's order


@dataclass(frozen=True, slots=True)
class Planned:
    """One launch of the final graph: the program's launches that it stands for, by number, and what
    it does.

    A part of a launch has a text for its number (``graph/collectives.py``).
    """

    members: tuple[int | str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Give all launches of the final graph one order over all groups.

    One order for each group would not be enough. Ranks that launch in one common order, and wait
    for a launch only after they start it, cannot wait for one another in a circle.
    """

    launches: tuple[Planned, ...]

    @property
    def parts(self) -> dict[int, tuple[int, str]]:
        """Return into how many parts each of the program's launches is cut, and how they lie."""
        found = (launch_in_parts(member) for planned in self.launches for member in planned.members)
        return {launch: (count, along) for launch, count, along in filter(None, found)}

    @property
    def text(self) -> str:
        """One line; equal plans have equal texts."""
        return json.dumps([[list(p.members), p.what] for p in self.launches])

    def text_for(self, trace: CollectiveTrace) -> str:
        """``PROGRAM`` if it is the order of ``trace``, else its text."""
        own = tuple(Planned((i,), launch.what) for i, launch in enumerate(trace.launches))
        return PROGRAM if self.launches == own else self.text

    @classmethod
    def of(cls, text: str) -> LaunchPlan:
        """Inverse of ``text``, which is not ``PROGRAM``. Raises ValueError for anything else."""
        try:
            return cls(
                tuple(
                    Planned(tuple(map(_number, members)), str(what))
                    for members, what in json.loads(text)
                )
            )
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no launch plan: {error}") from error


def _number(member: object) -> int | str:
    if isinstance(member, str) and launch_in_parts(member) is not None:
        return member
    if isinstance(member, int):
        return int(member)
    raise ValueError(f"no launch plan: {member!r} is no number of a launch")


# Global ranks of a group that moves data, by name; None for any other.
RanksOf = Callable[[str], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Frame:
    """The compiled frame that a graph is of, as ``CollectiveTrace`` has it."""

    partial: bool = False
    root: str = ""


def frame_of_graph() -> Frame:
    """The frame that Dynamo compiles now; an empty one outside of a compile."""
    return Frame(*dynamo.frame_in_work())


def number_launches(
    graph: fx.Graph,
    ranks_of: RanksOf,
    frame: Frame,
    *,
    phase: str,
    graph_id: str,
    options: str = "",
) -> CollectiveTrace:
    """The graph's trace; each of its launches is given its number."""
    groups: list[Group] = []
    numbers: dict[str, int] = {}
    launches: list[Launch] = []
    for node in graph.nodes:
        node.meta.pop(MEMBERS, None)
        if not is_launch(node):
            continue
        name = group_name(node)
        if name not in numbers:
            ranks = ranks_of(name)
            if ranks is None or len(ranks) < 2:
                continue
            numbers[name] = len(groups)
            groups.append(Group(c10d.own_name(name), ranks))
        node.meta[MEMBERS] = (len(launches),)
        path, files = _path(node)
        launches.append(
            Launch(what(node), numbers[name], path, _agreed_bytes(node), user_line(node), files)
        )
    return CollectiveTrace(
        tuple(groups),
        tuple(launches),
        phase == "backward",
        frame.partial,
        frame.root,
        graph_id,
        options,
        is_joint=phase == "joint",
    )


def place_of(traced: fx.Graph) -> str:
    """A digest of where a graph as Dynamo traced it stands in the program: its frame, and the lines
    of its nodes.

    Launches are known by these. Code from a cache has them as they were when it was made, so that
    it serves only where they still are.
    """
    frame = frame_of_graph()
    with_own_stack = {node.stack_trace: node for node in traced.nodes}.values()
    return digest([frame.partial, frame.root, *(_path(node)[0] for node in with_own_stack)])


def what(launch: fx.Node) -> str:
    """Describe what must be equal on all ranks: a launch's kind, reduction, coalescing and type.

    Sizes are left out.
    """
    parts = [kind(launch)]
    if (op := reduce_op(launch)) is not None:
        parts.append(op)
    if is_coalesced(launch):
        parts.append(f"coalesced of {len(list(input_tensors(launch)))}")
    return " ".join([*parts, dtype_name(launch) or "nothing"])


def plan_of(graph: fx.Graph) -> LaunchPlan:
    """Return the plan by which the graph launches now on groups of several ranks."""
    found = []
    for node in graph.nodes:
        if is_launch(node) and (members := node.meta.get(MEMBERS)):
            found.append(Planned(tuple(members), what(node)))
    return LaunchPlan(tuple(found))


def _path(node: fx.Node) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Functions and lines that lead to a node, and their files."""
    frames = frames_of(node)
    return (
        tuple(f"{dynamo.without_resuming(each['function'])}:{each['line']}" for each in frames),
        tuple(os.path.basename(each["file"]) for each in frames),
    )


def _agreed_bytes(launch: fx.Node) -> int | None:
    if kind(launch) in ONE_SIDED | OWN_SHARES:
        return None
    for tensor in input_tensors(launch):
        if any(isinstance(size, torch.SymInt) for size in tensor.shape):
            return None
    return payload_bytes(launch)
