"""Outputs of a graph that are views of its inputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch._aot_autograd.collect_metadata_analysis as _collect_metadata
import torch._functorch._aot_autograd.functional_utils as _functional_utils
from torch._C import _functionalization
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_dist.torch_compat.patching import Patch, SetAttribute, _optional_module


def storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that share memory, under functionalization too."""
    return StorageWeakRef(tensor.untyped_storage())


def has_tensors(tree: object) -> bool:
    """Return whether any leaf is a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(tree))


def overload(name: str, overload: str) -> Any:
    """The operator of a schema's name, such as ``aten::view``."""
    namespace, _, op = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


class _CallRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def recorded_views(view: torch.Tensor, base: torch.Tensor) -> tuple[Any, list[Any]]:
    """Replay what autograd recorded from ``base`` to ``view``: the result, and the operators'
    calls.
    """
    with torch.no_grad(), _CallRecorder() as recorder:
        found = view._view_func_unsafe(base)
    return found, recorder.calls


def local_views(local: torch.Tensor) -> object:
    """The views by which functionalization reached this tensor, or None; they can be pickled."""
    if not isinstance(local, FunctionalTensor):
        return None
    views = _functionalization.get_view_meta_sequence(local.elem)
    # torch 2.13 pickles memory that it has freed in place of an _unsafe_view's sizes: other
    # numbers, or a general protection fault.
    unsafe = _functionalization._unsafe_view_ViewMeta  # type: ignore[attr-defined]
    if any(view.has_symbolic_inputs or isinstance(view, unsafe) for view in views):
        return None
    return views


def apply_local_views(base: torch.Tensor, views: Any) -> torch.Tensor:
    """The same views of another tensor."""
    return _functionalization.apply_view_meta_sequence(base, views)


def on_output_aliases(
    record: Callable[..., Any],
    replay: Callable[..., object],
    apart: Callable[..., object],
    cls: type,
) -> list[Patch]:
    """Let ``record(args, outputs)`` say how outputs of ``cls`` come from their bases, and
    ``replay`` do it.

    AOTAutograd runs the program once to see what aliases what; ``record`` gives the outputs to look
    at and for each a way or None. The way stands in ``OutputAliasInfo.view_meta_sequence``, where
    AOTAutograd keeps those of plain tensors, and is given to ``replay(way, base, target,
    requires_grad)`` after each call, one after disable() too.

    It looks again at the program on local tensors, to count what it returns; ``apart(args,
    outputs)`` are the outputs to look at then, since the program returns none of the bases that it
    would count for aliases among them. Seen in torch 2.13 to 2.15.
    """
    upstream_collect = _collect_metadata.run_functionalized_fw_and_collect_metadata
    upstream_alias = _functional_utils.gen_alias_from_base

    @functools.wraps(upstream_collect)
    def collect(f: Any, *args: Any, **kwargs: Any) -> Any:
        ways: list[Any] = []
        returned: list[object] = []

        @functools.wraps(f)
        def watched(*flat: Any) -> Any:
            if not any(isinstance(arg, cls) for arg in flat):
                outputs = f(*flat)
                returned[:] = outputs
                return outputs
            # Autograd then records each view as an operator that can be replayed, and not as one
            # as_strided from the base, which DTensor refuses.
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                outputs = f(*flat)
            # Recorded here and not after the call: outputs and their bases are those of this very
            # trace.
            found, ways[:] = record(flat, outputs)
            # AOTAutograd flattens what it is given by its type, so a tuple stays a tuple.
            return type(outputs)(found)

        inner = upstream_collect(watched, *args, **kwargs)

        @functools.wraps(inner)
        def run(*flat: Any) -> object:
            metadata = inner(*flat)
            for i, way in enumerate(ways):
                info = metadata.output_info[i]
                # An output that AOTAutograd found to be no alias keeps its kind; a way of ours
                # would not be asked for.
                if way is not None and "alias" in info.output_type.name:
                    metadata.output_info[i] = dataclasses.replace(info, view_meta_sequence=way)
            _regenerate_detached_aliases(metadata, returned)
            # They are functional tensors of one trace, which the closure would otherwise keep
            # alive.
            returned.clear()
            return metadata

        return run

    @functools.wraps(upstream_collect)
    def collect_local(f: Any, *args: Any, **kwargs: Any) -> object:
        @functools.wraps(f)
        def watched(*flat: Any) -> Any:
            outputs = f(*flat)
            return type(outputs)(apart(flat, outputs))

        return upstream_collect(watched, *args, **kwargs)

    @functools.wraps(upstream_alias)
    def alias(
        base: Any, target: Any, requires_grad: bool, way: Any = None, *args: Any, **kwargs: Any
    ) -> object:
        # Where base and target have one layout and no way is known, upstream's plain alias is
        # right.
        if isinstance(base, cls) and (way is not None or not _same_layout(base, target)):
            return replay(way, base, target, requires_grad)
        return upstream_alias(base, target, requires_grad, way, *args, **kwargs)

    local_program = _optional_module("torch._functorch._aot_autograd.graph_capture_wrappers")
    # Each of these modules has imported the functions by name, so a patch of one is not seen by the
    # others.
    places = [
        _collect_metadata,
        _functional_utils,
        _optional_module("torch._functorch.aot_autograd"),
        _optional_module("torch._functorch._aot_autograd.runtime_wrappers"),
        local_program,
        _optional_module("torch._functorch._aot_autograd.standalone_runtime"),  # 2.15
    ]
    return [
        SetAttribute(place, name, value)
        for place in places
        for name, value in (
            (upstream_collect.__name__, collect_local if place is local_program else collect),
            (upstream_alias.__name__, alias),
        )
        if name in vars(place or object)
    ]


def _regenerate_detached_aliases(metadata: Any, outputs: Sequence[Any]) -> None:
    """Have outputs without gradients be made of the base that a graph returns for views of the same
    memory.

    AOTAutograd returns the base itself beside the views, from which they are made anew after a
    call. An alias of it that is detached is no view to it, so the graph returns the same tensor
    once more, as one that has no gradient: then the base has none either, and the views lose
    theirs. Seen in 2.13 to 2.15.
    """
    infos = metadata.output_info
    if len(infos) != len(outputs):
        return
    kinds = {info.output_type.name: info.output_type for info in infos}
    saved = kinds.get("alias_of_intermediate_save_as_output")
    if saved is None:
        return
    bases = {
        storage_key(output): info.base_idx
        for output, info in zip(outputs, infos, strict=True)
        if info.output_type is saved
    }
    found = False
    for i, (output, info) in enumerate(zip(outputs, infos, strict=True)):
        # The second is made of another output, which may be a view itself, by the views from the
        # base.
        plain = info.output_type.name in ("non_alias", "alias_of_intermediate_base_is_user_output")
        if not plain or not isinstance(output, torch.Tensor):
            continue
        base = None if output.requires_grad else bases.get(storage_key(output))
        if base is not None:
            kind, found = type(saved)["alias_of_intermediate"], True
            views = (
                _functional_utils.ViewMetaSequence(output)
                if isinstance(output, FunctionalTensor)
                else None
            )
            infos[i] = dataclasses.replace(
                info, output_type=kind, base_idx=base, view_meta_sequence=views
            )
    # The numbers of aliased outputs were counted from the kinds that have just changed.
    if found:
        metadata.__post_init__()


def _same_layout(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()
