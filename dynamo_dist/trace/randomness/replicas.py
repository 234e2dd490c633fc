"""A check that ranks with replicas draw the same numbers, made when a graph that draws is compiled.

A draw of a replicated DTensor is made on every rank from its own generator. Equal states give equal
numbers from then on; unequal ones let replicas drift apart without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

from dynamo_dist.errors import RanksDifferError
from dynamo_dist.job.agreement import GroupStates, check_agreement, excuse
from dynamo_dist.torch_compat.dtensor import draws

_drawn: set[tuple[Any, int]] = set()
_compared: set[str] = set()


def note(spec: Any) -> None:
    """A traced draw with the layout of ``spec``: along which dimensions of which mesh it is replicated."""
    mesh = spec.mesh
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_replicate() and mesh.size(mesh_dim) > 1:
            _drawn.add((mesh, mesh_dim))


def forget() -> None:
    """Before a compile: what others have traced does not count."""
    _drawn.clear()


class Frame(Protocol):
    """Of the compiled frame: which function it is of, and whether it is a part of it."""

    @property
    def root(self) -> str: ...
    @property
    def partial(self) -> bool: ...


def check(deadline_s: float, frame: Frame) -> None:
    """Compare random states with the replicas of what has been traced since ``forget``.

    Once a function, when it is first compiled: a rank that compiles it again has nobody to compare with. A part of a
    function, between graph breaks, is not compared, because other ranks may have cut it elsewhere. Raises
    RanksDifferError on every rank of a group whose states differ; see ``check_agreement``.
    """
    states = {
        mesh.get_group(mesh_dim).group_name: [_state(mesh.device_type)] for mesh, mesh_dim in _drawn
    }
    _drawn.clear()
    if frame.root in _compared:
        return
    if states:
        _compared.add(frame.root)
        what = f"draws of {frame.root}"
        if frame.partial:
            excuse(what, states, deadline_s)
        else:
            check_agreement(what, states, deadline_s, _different)


def _state(device_type: str) -> str:
    state = draws.random_state(device_type)
    return f"{device_type} {hashlib.sha256(state.numpy().tobytes()).hexdigest()[:12]}"


def _different(
    graph: str, group: GroupStates, first_rank: int, theirs: Sequence[str], rank: int
) -> RanksDifferError:
    return RanksDifferError(
        f"Ranks {first_rank} and {rank} hold replicas on group {group.name!r}, of which a compiled "
        f"function draws random numbers, and their generators differ: '{theirs[0]}' and "
        f"'{group.states[0]}' ({graph}).",
        "Each rank draws for itself: replicas would hold different numbers from here on.",
        "Call torch.manual_seed with one seed on all ranks before the first call, and use a generator "
        "of its own, torch.Generator(), for what ranks draw differently.",
    )
