"""Whether what traces a graph asks which rank this is: where nothing does, equal ranks trace equal
graphs.

DTensor remembers what it has found for a layout, its rank in it perhaps: that is forgotten first,
so that it asks again.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._library import fake_class_registry
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from inductor_passes.torch_compat import TorchFunction, Wrap

# Packages, and namespaces of operators, whose reads of the rank are noticed here: what others run
# may read it in ways of their own. A package of ours adds its own by ``notice_reads_of``.
_PACKAGES = {"torch", "inductor_passes", *sys.stdlib_module_names}
_NAMESPACES = {
    *("aten", "prims", "prim", "c10d", "_c10d_functional", "_c10d_functional_autograd"),
    *("device_mesh", "_dtensor", "inductor_passes"),
}
_OF_MESHES = ("get_rank", "get_local_rank", "_sym_get_coordinate")
# A rank's group of a mesh has other ranks in it than the group of the same name elsewhere.
_OF_GROUPS = ("get_rank", "get_group_rank", "get_global_rank", "get_process_group_ranks")
_LAYOUTS = "torch.distributed.tensor"
_LOCAL_SHAPE = "_compute_local_shape_and_global_offset"


class RankReads:
    """Reads of this thread since ``noticed()`` began. ``first``: what was read first; "" so far.
    ``permitted``: how many blocks that permit reads the thread is in.
    """

    def __init__(self) -> None:
        self.first, self.thread, self.permitted = "", threading.get_ident(), 0


_lock = threading.Lock()
_noticing: list[RankReads] = []
_changes = contextlib.ExitStack()  # of torch, made while anybody notices


def _note(what: str) -> None:
    """Something two frames up asks for the rank: each who notices gets to know."""
    code = sys._getframe(2).f_code
    for reads in _here():
        reads.first = reads.first or f"{what} in {code.co_qualname} ({Path(code.co_filename).name})"


def _of_this_thread() -> list[RankReads]:
    thread = threading.get_ident()
    return [each for each in _noticing if each.thread == thread]


def _here() -> list[RankReads]:
    """Who notices reads here and now."""
    return [each for each in _of_this_thread() if not each.permitted]


@contextlib.contextmanager
def as_a_key() -> Iterator[None]:
    """Permit reads of the rank in the block: they do not change what is traced.

    They only distinguish entries of a cache, or make no difference.
    """
    noticing = _of_this_thread()
    for each in noticing:
        each.permitted += 1
    try:
        yield
    finally:
        for each in noticing:
            each.permitted -= 1


def can_notice() -> bool:
    """Return whether DTensor can be made to ask again.
    ``_clear_DTensor_sharding_propagator_cache`` was seen in 2.11 to 2.14.
    """
    return hasattr(torch._C, "_clear_DTensor_sharding_propagator_cache") and hasattr(
        DeviceMesh, "get_coordinate"
    )


def strategies_are_known() -> bool:
    """Return whether all that decides layouts is torch's or ours: a user's own function may read
    what nobody notices.

    ``ShardingPropagator.op_to_rules``, ``op_strategy_funcs`` and ``op_single_dim_strategy_funcs``
    were seen in 2.11 to 2.14; ``register_sharding`` puts partial functions there.
    """
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    found = [each for name in tables for each in getattr(propagator, name, {}).values()]
    return all(
        not isinstance(each, functools.partial) and is_known(getattr(each, "func", each))
        for each in found
    )


def is_known(function: object) -> bool:
    """Return whether a function is torch's, ours or Python's own, by its module."""
    name = str(getattr(function, "__module__", None) or "builtins")
    return name.partition(".")[0] in _PACKAGES


def is_known_namespace(name: str) -> bool:
    """Return whether the operators of a namespace are torch's or ours."""
    return name in _NAMESPACES


def notice_reads_of(package: str, *namespaces: str) -> None:
    """Count a package, and operators of these namespaces, among those whose reads are noticed."""
    _PACKAGES.add(package)
    _NAMESPACES.update(namespaces)


@contextlib.contextmanager
def noticed() -> Iterator[RankReads]:
    """Notice in the block each read of the rank on this thread: of the job, a group or a mesh.

    The query whether this rank is in a mesh counts only where its place is looked at. The shape of
    a shard does not count if it is the same on all ranks. AOTAutograd traces on one thread.
    ``DeviceMesh._sym_get_coordinate`` was seen in 2.12 to 2.14,
    ``_compute_local_shape_and_global_offset`` in 2.13.
    """
    forget_layouts()
    reads = RankReads()
    with _lock:
        if not _noticing:
            _change(_changes)
        _noticing.append(reads)
    try:
        yield reads
    finally:
        with _lock:
            _noticing.remove(reads)
            if not _noticing:
                _changes.close()


def _change(undo: contextlib.ExitStack) -> None:
    for name in _OF_MESHES:
        if hasattr(DeviceMesh, name):
            _replace(undo, DeviceMesh, name, _noting)
    _replace(undo, DeviceMesh, "get_coordinate", _placed)
    for owner in (dist, distributed_c10d):
        for name in _OF_GROUPS:
            _replace(undo, owner, name, _noting)
    _replace(undo, dist.ProcessGroup, "rank", _noting)
    # A stand-in for an input has the values of its members, of which traced code asks methods.
    _replace(undo, fake_class_registry, "maybe_to_fake_obj", _unnoted)
    # Not imported for this: where DTensor is not in use nobody reads its shapes.
    utils = sys.modules.get(f"{_LAYOUTS}._utils")
    if hasattr(utils, _LOCAL_SHAPE):
        _replace(undo, utils, _LOCAL_SHAPE, _of_even)


def forget_layouts() -> None:
    """Forget what DTensor remembers of layouts on this thread: it finds all of it again."""
    torch._C._clear_DTensor_sharding_propagator_cache()
    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    remembering = [getattr(propagate, "cache", None)]
    for name, module in list(sys.modules.items()):
        if name.startswith(_LAYOUTS):
            # DTensor caches layouts per rank and thread. A cached one would be found without a read
            # of the rank that could be noticed.
            remembering += [each for each in vars(module).values() if _remembers(each)]
    for each in remembering:
        if each is not None:
            each.cache_clear()


def _remembers(value: object) -> bool:
    return isinstance(value, (functools._lru_cache_wrapper, FunctionType)) and hasattr(
        value, "cache_clear"
    )


def _replace(undo: contextlib.ExitStack, owner: Any, name: str, wrap: Wrap) -> None:
    upstream, held = getattr(owner, name), vars(owner).get(name)  # of a class: what binds it, too
    setattr(owner, name, functools.wraps(upstream)(wrap(upstream)))
    undo.callback(lambda: delattr(owner, name) if held is None else setattr(owner, name, held))


def _noting(upstream: TorchFunction) -> TorchFunction:
    def asked(*args: object, **kwargs: object) -> object:
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.startswith("torch._logging"):  # a line of a log has the rank
            with as_a_key():
                return upstream(*args, **kwargs)
        _note(upstream.__name__)
        return upstream(*args, **kwargs)

    return asked


def _unnoted(upstream: TorchFunction) -> TorchFunction:
    def made(*args: object, **kwargs: object) -> object:
        with as_a_key():
            return upstream(*args, **kwargs)

    return made


def _placed(upstream: TorchFunction) -> TorchFunction:
    def get_coordinate(self: DeviceMesh) -> tuple[int, ...] | None:
        found = upstream(self)
        return found if found is None or not _here() else _Place(found)

    return get_coordinate


class _Place(tuple[int, ...]):
    """A rank's place in a mesh, which says when it is looked at."""

    __slots__ = ()


def _looked_at(name: str) -> TorchFunction:
    upstream = getattr(tuple, name)

    def looked(self: _Place, *args: object) -> object:
        _note("get_coordinate")
        return upstream(self, *args)

    return looked


def _plain(self: _Place) -> tuple[object, ...]:
    return tuple, (tuple(self),)


_Place.__reduce__ = _plain  # type: ignore[assignment]
for _name in (
    *("__getitem__", "__iter__", "__len__", "__contains__", "__hash__", "__repr__"),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__add__", "__mul__", "__rmul__"),
    *("index", "count"),
):
    setattr(_Place, _name, _looked_at(_name))


def _of_even(upstream: TorchFunction) -> TorchFunction:
    def local_shape(
        shape: Sequence[int | torch.SymInt],
        mesh_shape: Sequence[int],
        lookup: object,
        placements: Sequence[Placement],
        skip_offset: bool = False,
    ) -> object:
        is_alike = skip_offset and _is_even(shape, mesh_shape, placements)
        with as_a_key() if is_alike else contextlib.nullcontext():
            return upstream(shape, mesh_shape, lookup, placements, skip_offset)

    return local_shape


def _is_even(
    shape: Sequence[int | torch.SymInt], mesh_shape: Sequence[int], placements: Sequence[Placement]
) -> bool:
    """Return whether all ranks have shards of one shape: plain shards whose dimensions divide by
    the ranks that share them.
    """
    ranks = [1] * len(shape)
    for placement, count in zip(placements, mesh_shape, strict=True):
        if type(placement) is Shard:
            ranks[placement.dim % len(shape)] *= count
        elif placement.is_shard() or not (placement.is_replicate() or placement.is_partial()):
            return False
    return all(type(size) is int for size in (*shape, *mesh_shape)) and not any(
        size % count for size, count in zip(shape, ranks, strict=True)
    )
