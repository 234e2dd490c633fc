"""Before a graph runs for the first time, its ranks check that they will launch the same.

Ranks that launch different collectives on a group hang, without a word. So each rank checks in with what
it will launch, through the job's c10d store: never by a collective, which would hang for the same reason.

For each group and graph: the first rank to come leaves its launches, every other compares its own with
them, the last to come says that all agree, and all wait for that word, but not for ever: a rank that
alone compiles a graph again has nobody to compare with. A handful of store operations a rank and group.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynamo_dist import _torch
from dynamo_dist.errors import RanksDifferError

log = logging.getLogger(__name__)

_AGREED = "agreed"
# How often this process has met a key: a name is used again after torch._dynamo.reset().
_met: Counter[str] = Counter()


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str | bytes) -> object: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def wait(self, keys: list[str], timeout: datetime.timedelta) -> object: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


@dataclass(frozen=True, slots=True)
class GroupLaunches:
    """What one graph launches on one group, in order. ``ranks``: the group's global ranks."""

    name: str
    ranks: tuple[int, ...]
    launches: tuple[str, ...]


# Makes the error of a group's ranks that differ: graph, group, first rank, its launches, this rank.
Different = Callable[[str, GroupLaunches, int, Sequence[str], int], RanksDifferError]


def check_agreement(
    graph: str,
    launches: Mapping[str, Sequence[str]],
    deadline_s: float,
    different: Different | None = None,
) -> None:
    """Compare this rank's launches, by group name, with those of the groups' other ranks.

    ``different`` makes the error of other things than launches that are compared so.

    Raises RanksDifferError on every rank of a group whose ranks differ. A rank that does not come within
    ``deadline_s`` is warned of, and the program goes on. Does nothing on fake groups or if
    ``deadline_s`` is 0.
    """
    store = _torch.job_store()
    if deadline_s <= 0 or store is None:
        return
    groups = [
        GroupLaunches(name, ranks, tuple(mine))
        for name, mine in sorted(launches.items())
        if (ranks := _torch.real_group_ranks(name)) is not None and len(ranks) > 1
    ]
    agree(store, _torch.global_rank(), graph, groups, deadline_s, different)


def agree(
    store: Store,
    rank: int,
    graph: str,
    groups: Sequence[GroupLaunches],
    deadline_s: float,
    different: Different | None = None,
) -> None:
    """``check_agreement`` with everything given."""
    keys = [_key(graph, group) for group in groups]
    try:
        for key, group in zip(keys, groups, strict=True):
            _check_in(store, key, rank, graph, group, different or _different)
    except RanksDifferError as error:
        for key in keys:
            store.set(f"{key}/verdict", str(error))
        raise
    end = time.monotonic() + deadline_s
    for key, group in zip(keys, groups, strict=True):
        _await_verdict(store, key, graph, group, end, deadline_s)


def _key(graph: str, group: GroupLaunches) -> str:
    ranks = hashlib.sha256(repr(group.ranks).encode()).hexdigest()[:12]
    key = f"dynamo_dist/agreement/{group.name}/{ranks}/{graph}"
    _met[key] += 1
    return f"{key}/{_met[key]}"


def _check_in(
    store: Store, key: str, rank: int, graph: str, group: GroupLaunches, different: Different
) -> None:
    text = json.dumps(group.launches).encode()
    mine = hashlib.sha256(text).hexdigest()
    first_rank, _, theirs = (
        store.compare_set(f"{key}/first", "", f"{rank} {mine}").decode().partition(" ")
    )
    if int(first_rank) == rank:
        store.set(f"{key}/launches", zlib.compress(text))
    elif theirs != mine:
        launches = json.loads(zlib.decompress(store.get(f"{key}/launches")))
        raise different(graph, group, int(first_rank), launches, rank)
    store.set(f"{key}/here/{rank}", "1")
    if store.add(f"{key}/count", 1) == len(group.ranks):
        store.set(f"{key}/verdict", _AGREED)


def _await_verdict(
    store: Store, key: str, graph: str, group: GroupLaunches, end: float, deadline_s: float
) -> None:
    verdict = f"{key}/verdict"
    left = max(0.001, end - time.monotonic())
    try:
        store.wait([verdict], datetime.timedelta(seconds=left))
    except RuntimeError:  # how stores say that time is up
        missing = [r for r in group.ranks if not store.check([f"{key}/here/{r}"])]
        log.warning(
            "After %.0f s, rank %s had not compiled graph %s, whose launches on group %s could not be "
            "compared; the program goes on. If it hangs, ranks run different programs.",
            deadline_s,
            ", ".join(map(str, missing)),
            graph,
            group.name,
        )
        return
    said = store.get(verdict).decode()
    if said != _AGREED:
        raise RanksDifferError(said)


def _different(
    graph: str, group: GroupLaunches, first_rank: int, theirs: Sequence[str], rank: int
) -> RanksDifferError:
    mine = group.launches
    index = next(
        (i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b),
        min(len(theirs), len(mine)),
    )

    def at(launches: Sequence[str]) -> str:
        return launches[index] if index < len(launches) else "no further launch"

    return RanksDifferError(
        f"Ranks {first_rank} and {rank} would launch different collectives on group {group.name!r} "
        f"in graph {graph}: launch {index} is '{at(theirs)}' on rank {first_rank} and "
        f"'{at(mine)}' on rank {rank}.",
        "Ranks match the collectives of a group by their order, so they would hang or mix up data.",
        "Make the compiled program the same on all ranks; `python -m inductor_passes verify-ranks` "
        "shows where they part. DYNAMO_DIST_AGREEMENT_SECONDS=0 turns this check off.",
    )
