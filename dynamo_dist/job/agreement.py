"""Ranks of a group compare what must be equal on all of them, through the job's c10d store.

Never by a collective, which would hang where ranks differ. For each group: the first rank to come leaves its
states, every other compares its own with them, the last to come says that all agree, and all wait for that word, but
not for ever. A handful of store operations a rank and group. What is compared is named by the program, not by a number
of this process, because other ranks may have compiled more or less.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynamo_dist.errors import RanksDifferError
from inductor_passes.torch_compat import c10d
from inductor_passes.torch_compat.c10d import Store

log = logging.getLogger(__name__)

_AGREED = "agreed"


@dataclass(frozen=True, slots=True)
class GroupStates:
    """The states that one rank has on one group, in order. ``ranks``: the group's global ranks."""

    name: str
    ranks: tuple[int, ...]
    states: tuple[str, ...]


# Makes the error of a group's ranks that differ: what, group, first rank, its states, this rank.
Different = Callable[[str, GroupStates, int, Sequence[str], int], RanksDifferError]


def check_agreement(
    what: str, states: Mapping[str, Sequence[str]], deadline_s: float, different: Different
) -> None:
    """Compare this rank's states, by group name, with those of the groups' other ranks.

    ``what`` names the comparison, the same on all ranks, once in a job.

    Raises what ``different`` makes, on every rank of a group whose ranks differ. A rank that does not come
    within ``deadline_s``, or a store that fails, is warned of, and the program goes on. Does nothing on fake
    groups or if ``deadline_s`` is 0.
    """
    store = c10d.job_store()
    if deadline_s <= 0 or store is None:
        return
    try:
        agree(store, c10d.global_rank(), what, _real(states), deadline_s, different)
    except RanksDifferError:
        raise
    except (RuntimeError, OSError, ValueError) as error:
        log.warning("Ranks could not compare %s: the job's store failed (%s).", what, error)


def excuse(what: str, states: Mapping[str, Sequence[str]], deadline_s: float) -> None:
    """Let nobody wait for this rank, which has nothing to compare."""
    store = c10d.job_store()
    if deadline_s <= 0 or store is None:
        return
    try:
        for group in _real(states):
            store.compare_set(f"{_key(what, group)}/verdict", "", _AGREED)
    except (RuntimeError, OSError) as error:
        log.warning("Ranks could not compare %s: the job's store failed (%s).", what, error)


def agree(
    store: Store,
    rank: int,
    what: str,
    groups: Sequence[GroupStates],
    deadline_s: float,
    different: Different,
) -> None:
    """``check_agreement`` with everything given."""
    keys = [_key(what, group) for group in groups]
    try:
        for key, group in zip(keys, groups, strict=True):
            _check_in(store, key, rank, what, group, different)
    except RanksDifferError as error:
        for key in keys:
            store.set(f"{key}/verdict", str(error))
        raise
    end = time.monotonic() + deadline_s
    for key, group in zip(keys, groups, strict=True):
        _await_verdict(store, key, what, group, end, deadline_s)


def _real(states: Mapping[str, Sequence[str]]) -> list[GroupStates]:
    return [
        GroupStates(name, ranks, tuple(mine))
        for name, mine in sorted(states.items())
        if (ranks := c10d.real_group_ranks(name)) is not None and len(ranks) > 1
    ]


def _key(what: str, group: GroupStates) -> str:
    ranks = hashlib.sha256(repr(group.ranks).encode()).hexdigest()[:12]
    return f"dynamo_dist/agreement/{group.name}/{ranks}/{what}"


def _check_in(
    store: Store, key: str, rank: int, what: str, group: GroupStates, different: Different
) -> None:
    text = json.dumps(group.states).encode()
    mine = hashlib.sha256(text).hexdigest()
    first_rank, _, theirs = (
        store.compare_set(f"{key}/first", "", f"{rank} {mine}").decode().partition(" ")
    )
    if int(first_rank) == rank:
        store.set(f"{key}/states", zlib.compress(text))
    elif theirs != mine:
        states = json.loads(zlib.decompress(store.get(f"{key}/states")))
        raise different(what, group, int(first_rank), states, rank)
    store.set(f"{key}/here/{rank}", "1")
    if c10d.comes_last(store, f"{key}/count", len(group.ranks)):
        store.compare_set(f"{key}/verdict", "", _AGREED)


def _await_verdict(
    store: Store, key: str, what: str, group: GroupStates, end: float, deadline_s: float
) -> None:
    verdict = f"{key}/verdict"
    left = max(0.001, end - time.monotonic())
    try:
        store.wait([verdict], datetime.timedelta(seconds=left))
    except RuntimeError:  # how stores say that time is up
        missing = [r for r in group.ranks if not store.check([f"{key}/here/{r}"])]
        log.warning(
            "After %.0f s, rank %s had not come to compare %s on group %s; the program goes on.",
            deadline_s,
            ", ".join(map(str, missing)),
            what,
            group.name,
        )
        return
    said = store.get(verdict).decode()
    if said != _AGREED:
        raise RanksDifferError(said)
