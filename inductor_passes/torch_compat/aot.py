"""AOTAutograd: graphs traced without a compile, and when a backward graph is compiled."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._mode_utils import no_dispatch

from inductor_passes.torch_compat import TorchFunction, wrapped
from inductor_passes.torch_compat.inductor import inductor_config, run_post_grad


def fake_tensor_mode() -> Any:
    """A mode in which new tensors have shapes and no storage; what depends on their numbers is a
    symbol. Seen in 2.11 to 2.15.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv  # loads sympy

    return FakeTensorMode(shape_env=ShapeEnv())


def numbers_of(value: torch.Tensor) -> Any:
    """Return what a tensor that is no fake one holds, also while a mode of fake ones is on.
    ``no_dispatch`` was seen in 2.11 to 2.14.
    """
    with no_dispatch():
        return value.detach().tolist()


def with_memory_of_its_own(value: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like another, without the cost of an operator in a mode that may be on.

    ``FakeTensor`` was seen in 2.11 to 2.15, ``no_dispatch`` in 2.11 to 2.14.
    """
    if not isinstance(value, FakeTensor):
        return torch.empty_like(value)
    with no_dispatch():
        # A fake tensor is a meta tensor with a device of its own: made directly, no mode records it
        # and no operator is dispatched.
        elem = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, elem, value.device)


def with_memory_of(value: torch.Tensor, source: torch.Tensor, behind: int) -> torch.Tensor | None:
    """Return a fake tensor like ``value``, ``behind`` elements into the memory of ``source``.

    ``behind`` counts from the start of ``source``. None if either is no fake tensor. ``FakeTensor``
    was seen in 2.11 to 2.15, ``no_dispatch`` in 2.11 to 2.14.
    """
    if not isinstance(value, FakeTensor) or not isinstance(source, FakeTensor):
        return None
    # The offset of a tensor counts from its storage, and ``behind`` from the tensor.
    place = int(source.storage_offset()) + behind
    with no_dispatch():
        elem = torch.empty(0, dtype=value.dtype, device="meta")
        # It is the same storage, so that torch sees that the two tensors alias.
        elem.set_(source.untyped_storage(), place, value.shape, value.stride())
        return FakeTensor(value.fake_mode, elem, value.device)


def mode_of(value: object) -> Any:
    """Return the mode in which a fake tensor was made, to make others in; for anything else a
    context that does nothing.

    ``FakeTensor.fake_mode`` was seen in 2.11 to 2.15.
    """
    return getattr(value, "fake_mode", None) or contextlib.nullcontext()


def run_on_local_tensors(
    call: TorchFunction, world_size: int, arguments: Iterable[Mapping[int, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Call ``call`` once on tensors that hold every rank's value; its flat results, by rank.

    ``LocalTensorMode`` was seen in 2.11 to 2.15.
    """
    with LocalTensorMode(world_size):
        results = call(*(LocalTensor(dict(of_ranks)) for of_ranks in arguments))
    flat = results if isinstance(results, (list, tuple)) else [results]
    return [[tensor._local_tensors[rank] for tensor in flat] for rank in range(world_size)]


def propagate_shapes(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Give every node a fake value, ``meta["val"]``, from those of the graph's inputs. Seen in
    2.11 to 2.15.
    """
    prop = FakeTensorProp(gm, detect_fake_mode(inputs))
    mode: Any = prop._mode
    fake = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    prop.propagate_dont_convert_inputs(*fake)


class _Reached(Exception):
    pass


def post_grad_until_ours(gm: fx.GraphModule, inputs: Any, is_inference: bool) -> None:
    """Run upstream's post-grad passes up to ``post_grad_custom_post_pass``. Seen in 2.11 to
    2.15.
    """

    def stop(graph: fx.Graph) -> None:
        raise _Reached

    config: Any = inductor_config()
    with config.patch(post_grad_custom_post_pass=stop), contextlib.suppress(_Reached):
        run_post_grad(gm, inputs, is_inference)


class _Wanted:
    """A setting of AOTAutograd's that is decided when it is read. In keys of caches and in
    configuration that is written down it is True.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted

    def __bool__(self) -> bool:
        return self._is_wanted()

    def __repr__(self) -> str:
        return "True"

    def __reduce__(self) -> tuple[Callable[[object], bool], tuple[bool]]:
        return bool, (True,)


@contextlib.contextmanager
def backward_at_once(unless_failed: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Compile backward graphs with their forward ones, not when they are first needed.

    A compile that failed, of which ``unless_failed`` then says so, is tried again when it is
    needed, and is no error before. ``force_non_lazy_backward_lowering`` was seen in 2.11 to 2.15.
    """
    # AOTAutograd leaves a backward graph with symbolic sizes uncompiled until its first call. Its
    # caller may be past launches of the forward graph by then, for which peers still wait.
    name = "force_non_lazy_backward_lowering"
    if not hasattr(functorch_config, name):
        yield
        return
    # It is read before a backward graph's compile, and where that raises read again: true there
    # means raise, and false means leave the graph for later.
    with functorch_config.patch({name: _Wanted(lambda: not unless_failed())}):
        yield


def tangents(graph: fx.Graph) -> list[fx.Node]:
    """Return the inputs of a joint graph that only its backward reads. The names
    ``tangents_...`` were seen in 2.11 to 2.15.
    """
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if str(node.target).startswith("tangents")]


def is_joint(graph: fx.Graph) -> bool:
    """Return whether a graph is of forward and backward together."""
    return bool(tangents(graph))


@contextlib.contextmanager
def merged_without(
    apart: Callable[[fx.Graph], set[Any]], *, again: Callable[[fx.Graph], bool]
) -> Iterator[None]:
    """Let AOTAutograd merge equal nodes of a joint graph in the block, but not calls of the
    operators ``apart``.

    Where ``again`` has changed what was merged, it is merged once more.
    ``partitioners.fx_graph_cse`` and ``compile_utils.rand_ops`` were seen in 2.11 to 2.15; where
    they are missing, upstream's way stays.
    """
    from torch._functorch import compile_utils, partitioners  # loads Inductor

    if not hasattr(compile_utils, "rand_ops"):
        yield
        return

    def merging(upstream: Callable[..., fx.Graph]) -> Callable[..., fx.Graph]:
        def merged(graph: fx.Graph, **how: object) -> fx.Graph:
            before = compile_utils.rand_ops
            # ``fx_graph_cse`` never merges what is in ``rand_ops``: it is the only list of
            # exceptions that it has.
            compile_utils.rand_ops = [*before, *apart(graph)]
            try:
                return upstream(graph, **how)
            finally:
                compile_utils.rand_ops = before

        def changed(graph: fx.Graph, **how: object) -> fx.Graph:
            found = merged(graph, **how)
            # What ``again`` has replaced may leave equal nodes behind, which are merged by a second
            # run.
            return merged(found, **how) if again(found) else found

        return changed

    with wrapped(partitioners, "fx_graph_cse", merging):
        yield


@contextlib.contextmanager
def before_partition(
    ask: Callable[[fx.GraphModule, dict[str, Any]], None],
) -> Iterator[None]:
    """Call ``ask`` with a joint graph that was traced in the block, and the arguments by name,
    before Inductor's passes see it.

    ``compile_fx.partition_fn`` was seen in 2.11 to 2.15; where it is missing, nobody asks.
    """
    from torch._inductor import compile_fx  # loads all of it

    def asking(upstream: TorchFunction) -> TorchFunction:
        def partition(gm: fx.GraphModule, *args: object, **how: object) -> object:
            ask(gm, how)
            return upstream(gm, *args, **how)

        return partition

    with wrapped(compile_fx, "partition_fn", asking):
        yield


def values_kept_for_backward(joint: fx.GraphModule, forward_results: int) -> frozenset[str]:
    """Return the names of what upstream's partitioner would keep of a joint graph's forward.

    ``min_cut_rematerialization_partition`` was seen in 2.11 to 2.15.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    # Without CSE names stay what they are.
    with functorch_config.patch(cse=False):
        forward, _ = min_cut_rematerialization_partition(joint, (), num_fwd_outputs=forward_results)
    results: Any = forward.graph.output_node().args[0]
    return frozenset(node.name for node in results[forward_results:])
