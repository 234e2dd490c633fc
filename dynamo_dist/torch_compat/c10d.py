"""c10d: its groups and its private functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as _distributed_c10d
import torch.distributed.distributed_c10d as _c10d
import torch.distributed.nn.functional as _nn_functional

from dynamo_dist.torch_compat.patching import has

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# The group registered under a name; raises if there is none.
resolve_process_group: Callable[[str], Any] = vars(_c10d)["_resolve_process_group"]
group_tag: Callable[[object], str] = vars(_c10d)["_get_group_tag"]


def is_registered_group(group: Any) -> bool:
    """Return whether a process group is alive: c10d still gives it for its name."""
    try:
        return resolve_process_group(group.group_name) is group
    except (RuntimeError, ValueError, KeyError, LookupError, AttributeError):
        return False


def groups_of_mesh(mesh: DeviceMesh) -> tuple[object, ...]:
    """The groups of a mesh's dimensions; none where it was made without, or this rank is no
    member.
    """
    try:
        return tuple(mesh.get_all_groups())
    except (RuntimeError, ValueError, KeyError, LookupError, AttributeError):
        return ()


register_work: Callable[[torch.Tensor, object], None] = vars(_distributed_c10d)["_register_work"]
premul_sum: Callable[[float], object] = vars(_distributed_c10d)["_make_nccl_premul_sum"]


def c10d_function(name: str) -> Any:
    """A function of ``torch.distributed.distributed_c10d``, private ones too; None if it has
    none.
    """
    return getattr(_c10d, name, None)


def nn_functional_function(name: str) -> Callable[..., object] | None:
    """A function of ``torch.distributed.nn.functional``; None if this torch lacks it."""
    found: Callable[..., object] | None = getattr(_nn_functional, name, None)
    return found


def nn_function(name: str) -> Any:
    """An autograd function of ``torch.distributed.nn.functional``."""
    return getattr(_nn_functional, f"_{name}")


def collective_options(kind: str) -> object:
    """New options of a backend's collective: ``kind`` is "Allreduce", "Barrier" and so on."""
    return getattr(_distributed_c10d, f"{kind}Options")()


def functional_op(name: str) -> tuple[object, ...]:
    """An operator of ``torch.ops._c10d_functional`` and its overload; nothing if it has none."""
    if not has(torch.ops._c10d_functional, name, off=f"calls of {name} stay as they are in graphs"):
        return ()
    packet = getattr(torch.ops._c10d_functional, name)
    return packet, packet.default
