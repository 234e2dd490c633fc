"""Groups and meshes: made while tracing or before, entered as contexts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.distributed_c10d as _c10d
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
from torch._library import opaque_object as _opaque
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from dynamo_dist.torch_compat.dynamo_building import call_traced
from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction, has


def no_modes() -> Any:
    """Inside, tensors are real, whatever fake or dispatch mode is on. Seen in 2.13 to 2.15."""
    return _disable_current_modes()


def on_group_creation(made: Callable[[Mapping[str, Any], Any], None]) -> list[Patch]:
    """Call ``made(arguments, group)`` after each eager ``new_group``, on every rank.

    ``_new_group_with_tag`` was seen in 2.13 to 2.15.
    """
    name = "_new_group_with_tag"
    signature = inspect.signature(vars(_c10d)[name])

    def new_group(upstream: Upstream, *args: Any, **kwargs: Any) -> object:
        group = upstream(*args, **kwargs)
        made(signature.bind(*args, **kwargs).arguments, group)
        return group

    return [WrapFunction(_c10d, name, new_group)]


def keeps_order_of_ranks(mesh: DeviceMesh) -> bool:
    """Return whether groups of the mesh have their ranks in its order, not sorted; new in 2.15."""
    return getattr(mesh, "_preserve_rank_order", False)


def on_mesh_creation(made: Callable[[Any], None]) -> list[Patch]:
    """Call ``made(mesh)`` after each mesh that eager code makes."""

    def init(upstream: Upstream, self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        made(self)

    return [WrapFunction(DeviceMesh, "__init__", init)]


class MeshContext(GenericContextWrappingVariable):
    """``with mesh:``. Its ``__enter__`` and ``__exit__`` are Python and are traced with the
    tracker.
    """

    def __init__(self, tracker: Any) -> None:
        super().__init__(tracker.real)
        self.tracker = tracker

    def enter(self, tx: Any) -> Any:
        return call_traced(tx, type(self.cm_obj).__enter__, [self.tracker], {})

    def exit(self, tx: Any, *args: Any) -> Any:
        result = call_traced(tx, type(self.cm_obj).__exit__, [self.tracker, *args], {})
        tx.active_generic_context_managers.pop()
        return result


def mesh_as_context(tracker: Any) -> list[Patch]:
    """``with mesh:`` for meshes tracked by ``tracker``. Seen in 2.13 to 2.15."""

    def setup_or_before_with(upstream: Upstream, self: Any, inst: Any) -> None:
        top = self.stack[-1].realize()
        if isinstance(top, tracker):
            self.pop()
            self.push(MeshContext(top))
        upstream(self, inst)

    return [WrapFunction(InstructionTranslatorBase, "setup_or_before_with", setup_or_before_with)]


def derive_by_overload(cls: type) -> list[Patch]:
    """Objects of ``cls`` that AOTAutograd derives from a graph's inputs are calls of an operator's
    overload.

    Upstream leaves the operator's name without an overload in the graph, such as ``_get_submesh``
    for a slice of a mesh, which Inductor refuses. Seen in 2.13 to 2.15.
    """
    info = _opaque.get_opaque_obj_info(cls)
    if not has(info, "reconstruct_fn", off="Inductor takes no slice of a mesh in a graph"):
        return []

    def derive(upstream: Upstream, *args: Any) -> object:
        proxy = upstream(*args)
        if proxy is not None and isinstance(proxy.node.target, torch._ops.OpOverloadPacket):
            proxy.node.target = proxy.node.target.default
        return proxy

    return [WrapFunction(info, "reconstruct_fn", derive)]
