"""Private torch names of random operators: what AOTAutograd's partitioner does with them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch._functorch.compile_utils as _compile_utils
import torch._functorch.partitioners as _partitioners
import torch._prims.rng_prims as _rng_prims
import torch.distributed.tensor._api as _dtensor_api
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import CheckpointPolicy

from dynamo_dist._torch import Change as Change
from dynamo_dist._torch import SetAttribute, SetItem, WrapAttribute


def save_states_before_objects() -> list[Change]:
    """Random states that a backward graph replays stand before the objects that it needs.

    What a forward graph saves is read back by position: tensors, objects such as a DeviceMesh, sizes.
    Stock adds the states behind the objects, where the runtime takes a mesh for a tensor. Seen in 2.12
    to 2.15; in 2.11 a mesh is no value of a graph.
    """
    stock = _partitioners.functionalize_rng_ops

    @functools.wraps(stock)
    def functionalize(joint: Any, forward: Any, backward: Any, last: int) -> Any:
        inputs = backward.graph.find_nodes(op="placeholder")
        tangent = next((node for node in inputs if "tangent" in node.name), None)
        saved = inputs[: inputs.index(tangent)] if tangent is not None else []
        objects = [node for node in saved if _is_object(node)]
        forward, backward = stock(joint, forward, backward, last + len(objects))
        for node in objects:
            tangent.prepend(node)  # type: ignore[union-attr]
        backward.recompile()
        return forward, backward

    return [SetAttribute(_partitioners, "functionalize_rng_ops", functionalize)]


def _is_object(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), FakeScriptObject)


def rng_operator() -> Any:
    """The graph's operator that draws a shard's numbers at its offset; None before torch 2.12 or so."""
    return getattr(_rng_prims, "run_dtensor_rng_op", None)


def draw_once() -> list[Change]:
    """Draws of DTensors on CUDA are neither merged nor repeated, which would change what is drawn.

    They are calls of one higher-order operator, without the tag by which AOTAutograd knows random
    operators: it merges two draws of equal arguments into one, and in a checkpointed block draws anew
    for the backward. Its results are saved instead. Seen in 2.13 to 2.15.
    """
    operator = rng_operator()
    if operator is None:
        return []
    stock = _partitioners.force_save_effectful_ops

    @functools.wraps(stock)
    def force_save(joint: fx.GraphModule) -> None:
        stock(joint)
        for node in joint.graph.find_nodes(op="call_function", target=operator):
            items = node.users if isinstance(node.meta.get("val"), (tuple, list)) else ()
            for each in (node, *items):
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    return [
        SetAttribute(_partitioners, "force_save_effectful_ops", force_save),
        *_never_merged([operator]),
    ]


def _never_merged(operators: Iterable[Any]) -> list[Change]:
    return [WrapAttribute(_compile_utils, "rand_ops", lambda stock: [*stock, *operators])]


def known_as_random(operators: Iterable[Any]) -> list[Change]:
    """AOTAutograd knows these as random: not merged, and in a checkpoint drawn again from the saved state.

    Its lists name torch's operators without their overloads. Seen in 2.11 to 2.15.
    """
    packets = {op.overloadpacket for op in operators}
    lists = ("fusible_ops", "random_ops")

    def known(stock: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(stock)
        def known_operators() -> Any:
            found = stock()
            return dataclasses.replace(
                found, **{name: getattr(found, name) | packets for name in lists}
            )

        return known_operators

    return [WrapAttribute(_partitioners, "get_default_op_list", known), *_never_merged(packets)]


_RUN_LOCALLY = "_dispatch_get_local_results_slow_path"


def on_traced_draw(note: Callable[[Any], None]) -> list[Change]:
    """Call ``note(spec)`` for each random operator on a DTensor that is traced. Seen in 2.11 to 2.15."""

    def noting(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def results(self: Any, op: Any, args: Any, *rest: Any) -> Any:
            if op in self._random_ops and _are_we_tracing():
                note(args[0]._spec)
            return stock(self, op, args, *rest)

        return results

    return [WrapAttribute(OpDispatcher, _RUN_LOCALLY, noting)]


def on_draw(drawer: Callable[[Any, Any, Any], Any]) -> list[Change]:
    """Have ``drawer(op, mesh, placements)`` give what draws in place of ``op`` on local tensors.

    Torch asks for the operator in its set of random ones, and calls any other as it is. Seen in 2.11 to 2.15.
    """

    def drawing(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def results(self: Any, op: Any, args: Any, info: Any) -> Any:
            if op in self._random_ops:
                output = info.output_sharding.output_spec
                spec = output[0] if isinstance(output, (tuple, list)) else output
                # Threads that are ranks share a decision, and with it the mesh of one of them.
                op = drawer(op, args[0].device_mesh, spec.placements)
            return stock(self, op, args, info)

        return results

    return [WrapAttribute(OpDispatcher, _RUN_LOCALLY, drawing)]


def on_factory(wrap: Callable[[Any], Any]) -> list[Change]:
    """Have ``wrap(stock)`` answer ``torch.distributed.tensor``'s factories. Seen in 2.11 to 2.15."""
    return [WrapAttribute(_dtensor_api, "_dtensor_init_helper", wrap)]


def draws_at_offsets(mesh: Any) -> bool:
    """Return whether torch gives the shards of a mesh's devices numbers of their own."""
    return hasattr(_get_device_handle(mesh.device_type), "set_rng_state")


def is_sharded(placement: Any) -> bool:
    """Return whether ranks along the mesh dimension hold different parts."""
    return placement.is_shard() or isinstance(placement, _StridedShard)


def coordinate(mesh: Any, mesh_dim: int) -> Any:
    """Return this rank's coordinate along a dimension of its mesh; symbolic where one rank compiles for all.

    ``_sym_get_coordinate`` is there from 2.12 on.
    """
    symbolic = getattr(mesh, "_sym_get_coordinate", None)
    return mesh.get_coordinate()[mesh_dim] if symbolic is None else symbolic(mesh_dim)


def is_eager(args: Iterable[Any]) -> bool:
    """Return whether an operator on these would compute at once: no tensor is fake, traced or without data."""
    return get_proxy_mode() is None and all(
        type(each) in (torch.Tensor, torch.nn.Parameter) and not each.is_meta
        for each in args
        if isinstance(each, torch.Tensor)
    )


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on ``device`` use unless they are given one."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = module.default_generators[index]
    return found


def next_number(generator: torch.Generator) -> int:
    """One number of 63 bits, unseen by modes that watch operators."""
    with _disable_current_modes():
        number = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(number.random_(generator=generator))


_DRAWN_BY_SEED = ("aten.rand.default", "aten.randn.default", "aten.randint.low")


class _OfShard(TorchDispatchMode):
    """The draws that Inductor makes by seeds are those of a shard in the block. Seen in 2.11 to 2.15."""

    def __init__(self, shard: Any, own: Mapping[Any, Any]) -> None:
        super().__init__()
        self.shard, self.own = shard, own

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from torch._inductor.decomposition import fast_random_decomps

        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*args, **kwargs)
        decomposition = fast_random_decomps().get(op)
        if decomposition is None or str(op) in _DRAWN_BY_SEED:
            return self.own[op](self.shard, *args, **kwargs)
        with self:
            return decomposition(*args, **kwargs)


def decompose_for_inductor(operators: Mapping[Any, Any]) -> list[Change]:
    """Each of torch's operators as ``own(shard, ...)`` in a graph, by what Inductor makes of torch's.

    Inductor's draws take a seed, to which the shard's position is added. Not while its ``fallback_random`` is
    set; and what it leaves to torch, on the CPU at least, is called as it is. Imports Inductor's lowering, which
    takes a second. Seen in 2.11 to 2.15.
    """
    from torch._inductor.decomposition import fast_random_decomps
    from torch._inductor.fx_passes import replace_random

    table, aten = fast_random_decomps(), torch.ops.aten
    left = (aten.bernoulli.p, *(getattr(aten.normal, each) for each in aten.normal.overloads()))

    def decomposed(op: Any) -> Callable[..., Any]:
        def drawn(shard: Any, *args: Any, **kwargs: Any) -> Any:
            with _OfShard(shard, operators):
                return table[op](*args, **kwargs)

        return drawn

    return [
        *(
            SetItem(table, own, decomposed(stock))
            for stock, own in operators.items()
            if stock in table and stock not in left and str(stock) not in _DRAWN_BY_SEED
        ),
        *(
            SetItem(
                replace_random.patterns.patterns, ("call_function", own), [_by_seed(stock, own)]
            )
            for stock, own in operators.items()
            if str(stock) in _DRAWN_BY_SEED
        ),
    ]


def _by_seed(stock: Any, own: Any) -> Any:
    from torch._inductor import inductor_prims
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, GraphPatternEntry

    name = stock._schema.name.partition("::")[2]

    def replace(match: Any, shard: Any, *args: Any, **kwargs: Any) -> None:
        device = torch.device(kwargs.get("device") or "cpu")
        dtype = kwargs.get("dtype") or (
            torch.int64 if name == "randint" else torch.get_default_dtype()
        )

        def drawn(shard: Any, *args: Any) -> Any:
            seed = inductor_prims.seed(device) + shard
            if name == "randint":
                return inductor_prims.randint(*args, seed).to(dtype)
            return inductor_prims.random(*args, seed, name).to(dtype)

        match.replace_by_example(drawn, [shard, *args])

    pattern = CallFunctionVarArgs(own)
    return GraphPatternEntry(pattern=pattern, extra_check=lambda match: True, handler=replace)


def random_state(device_type: str) -> torch.Tensor:
    """The state of the generator that operators of a device type use by default, as bytes on the CPU."""
    return default_generator(torch.device(device_type)).get_state()
