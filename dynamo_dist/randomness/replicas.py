"""Whether ranks that hold replicas draw the same numbers, asked when a graph that draws is compiled.

A draw of a replicated DTensor is made on every rank from its own generator. Equal states give equal
numbers from then on; unequal ones let replicas drift apart without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from dynamo_dist.errors import RanksDifferError
from dynamo_dist.randomness import _torch
from dynamo_dist.runtime.agreement import GroupLaunches, check_agreement

_drawn: set[tuple[Any, int]] = set()


def note(spec: Any) -> None:
    """A traced draw with the layout of ``spec``: along which dimensions of which mesh it is replicated."""
    mesh = spec.mesh
    for mesh_dim, placement in enumerate(spec.placements):
        if placement.is_replicate() and mesh.size(mesh_dim) > 1:
            _drawn.add((mesh, mesh_dim))


def forget() -> None:
    """Before a compile: what others have traced does not count."""
    _drawn.clear()


def check(deadline_s: float) -> None:
    """Compare random states with the replicas of what has been traced since ``forget``.

    Raises RanksDifferError on every rank of a group whose states differ; see ``check_agreement``.
    """
    states = {
        mesh.get_group(mesh_dim).group_name: [_state(mesh.device_type)] for mesh, mesh_dim in _drawn
    }
    _drawn.clear()
    if states:
        check_agreement(f"draws of {_torch.compile_id()}", states, deadline_s, _different)


def _state(device_type: str) -> str:
    state = _torch.random_state(device_type)
    return f"{device_type} {hashlib.sha256(state.numpy().tobytes()).hexdigest()[:12]}"


def _different(
    graph: str, group: GroupLaunches, first_rank: int, theirs: Sequence[str], rank: int
) -> RanksDifferError:
    return RanksDifferError(
        f"Ranks {first_rank} and {rank} hold replicas on group {group.name!r}, of which a compiled "
        f"function draws random numbers, and their generators differ: '{theirs[0]}' and "
        f"'{group.launches[0]}' ({graph}).",
        "Each rank draws for itself: replicas would hold different numbers from here on.",
        "Call torch.manual_seed with one seed on all ranks before the first call, and use a generator "
        "of its own, torch.Generator(), for what ranks draw differently.",
    )


def changes() -> list[_torch.Change]:
    """What enabling does to know of draws."""
    return _torch.on_traced_draw(note)
