"""Clone the groups of a mesh, on all of its ranks or on none."""

from __future__ import annotations

from collections import Counter

import torch
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.agree import orders
from inductor_passes.agree.share import share
from inductor_passes.agree.store import StoreFailedError
from inductor_passes.agree.stream import Group
from inductor_passes.errors import GroupError, OptionError
from inductor_passes.graph import channels
from inductor_passes.torch_compat import c10d

_calls: Counter[str] = Counter()  # by group: the how-manieth call ranks meet in


def clone_groups(mesh: DeviceMesh) -> None:
    """Give the scheduler a second channel over the peers of each group of a mesh, for option ``channels=2``.

    A collective: all ranks of the mesh call it, after the mesh is made and before they compile. A group that has a clone
    keeps it, and one of a single rank needs none. Clones live until ``destroy_process_group()``; after
    ``dynamo_dist.disable()`` no later compile uses them. On CUDA a clone costs NCCL's buffers for another communicator.

    Raises OptionError for what is no mesh, and GroupError while compiling, for groups that are fake or destroyed, and on every
    rank where one of them did not call within ``DYNAMO_DIST_AGREEMENT_SECONDS``.
    """
    if torch.compiler.is_compiling():
        raise GroupError(
            "clone_groups() was called while compiling.",
            "To make a group is a collective, which no graph holds.",
            "Call it once, before the first call of a compiled function.",
        )
    if not isinstance(mesh, DeviceMesh):
        raise OptionError(
            f"clone_groups() got {mesh!r}.",
            "It clones the groups of a mesh.",
            "Pass a DeviceMesh, such as init_device_mesh('cuda', (8,)).",
        )
    for name in _names(mesh):
        _clone(name)


def _names(mesh: DeviceMesh) -> list[str]:
    try:
        return [group.group_name for group in mesh.get_all_groups()]
    except (RuntimeError, KeyError, ValueError) as error:
        raise _unusable(f"of {mesh}", str(error)) from error


def _clone(name: str) -> None:
    ranks = c10d.real_group_ranks(name)
    if ranks is None:
        raise _unusable(f"{name!r}", "it is fake, or was destroyed")
    if len(ranks) < 2 or channels.second(name) is not None:
        return
    known = orders.current()
    group = Group(name, ranks)
    meeting = f"clones/{group.id}/{_calls[group.id]}"
    _calls[group.id] += 1
    me = ranks.index(c10d.global_rank())
    try:
        if known is None:
            raise StoreFailedError("the job has none")
        shared = known.ask(share(me, len(ranks), meeting, "here", lambda of: f"{len(of)} ranks"))
    except StoreFailedError as error:
        raise GroupError(
            f"Group {name!r} is not cloned: ranks cannot meet through the job's store ({error}).",
            "A rank that made a group alone would wait for the others.",
            f"Let {orders.SECONDS} be more than 0, and initialise the default process group on all ranks.",
        ) from error
    if shared.text is None:
        raise GroupError(
            f"Group {name!r} of ranks {', '.join(map(str, ranks))} is not cloned: {shared.why} (ranks counted in the group).",
            "To make a group is a collective: every rank of the mesh has to call clone_groups().",
            "Call clone_groups(mesh) on all ranks, at the same place of the program.",
        )
    channels.add(name, c10d.new_group_like(name))


def _unusable(which: str, why: str) -> GroupError:
    return GroupError(
        f"clone_groups() cannot clone group {which}: {why}.",
        "A clone is a group of real ranks that can launch.",
        "Call it after init_process_group() with a real backend, and before destroy_process_group().",
    )
