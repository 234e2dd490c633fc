"""DTensors while tracing: construction, attributes, copies, subclasses, and the list of all that is
changed in torch for them.

Upstream answers ``hasattr`` by the attributes of a plain tensor, so that a program that asks for
``to_local`` or ``full_tensor`` takes the branch for plain tensors.

``distribute_tensor``, ``zeros``, ``ones``, ``empty`` and ``full`` are Python that traces, up to
this call: a spec is no value of a graph. Its mesh, placements, shape and stride are.

Upstream traces how the class is pickled, and ends inside its mesh.

They break the graph: eager mode runs the operation, and the next graph gets what it returned.

Traced, operators are taken apart that eager runs as one: ``one_hot`` compares with a range of
classes, ``interpolate`` picks by indices that it computes. Torch refuses to mix these with
DTensors, as it refuses a rank's own. Where a call was given DTensors alone, they are no rank's own:
they come from sizes and numbers that all ranks have. So a call that fails for them runs once more
with plain tensors as replicas, unless it draws random numbers, which ranks would not have in
common.

AOTAutograd takes what they hold for a DTensor's, and stops when the function runs.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import (
    aot_partition,
    aot_runtime,
    aot_tracing,
    dtensor_dispatch,
    dtensor_placements,
    dtensor_ranks,
    dtensor_specs,
    dynamo_building,
    dynamo_dtensors,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import contexts, distribution, dtensor_views, higher_order, placement

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase, Source, VariableTracker


def has_tensor_attribute(tracker: VariableTracker, cls: type, name: str) -> bool | None:
    """True for what DTensor's class has; None leaves the rest, such as an instance's own, to
    upstream.

    No guard: upstream guards a DTensor's type, and what a class has does not change.
    """
    if not issubclass(cls, DTensor):
        return None
    found = inspect.getattr_static(cls, name, None)
    # A property may raise AttributeError, which hasattr() answers by False.
    return True if found is not None and not isinstance(found, property) else None


def attribute(tx: InstructionTranslatorBase, tracker: VariableTracker, name: str) -> Any:
    """Return an attribute that upstream gets wrong, see below; None leaves the rest to upstream.

    ``_local_tensor`` shares memory with the DTensor, also when it is written to. ``_spec`` of a
    DTensor that the program made cannot be built by upstream. A gradient's layout breaks.
    """
    if name not in ("_local_tensor", "_spec", "placements"):
        return None
    if not isinstance(dynamo_building.fake_tensor(tracker), DTensor):
        return None
    if name == "_local_tensor":
        return dynamo_building.call_traced(tx, traced_local, [tracker], {})
    # Of an input upstream reads spec and placements itself, with guards.
    if tracker.source is not None:
        return None
    if dynamo_dtensors.is_in_backward_hook(tx):
        dynamo_building.graph_break(
            "Layout of a gradient in a backward hook",
            name,
            "How a gradient is laid out is decided when the backward graph is made, after this "
            "trace.",
            "Give the gradient a layout first: grad = grad.redistribute(mesh, [Replicate()])",
        )
    if name == "placements":
        return None
    return dynamo_building.call_traced(tx, traced_spec, [tracker], {})


def traced_local(tensor: DTensor) -> torch.Tensor:
    """Traced: the local tensor, which is outside of autograd."""
    # ``to_local`` records a gradient, while ``_local_tensor`` is outside of autograd in eager mode.
    detached: Any = tensor.detach()
    return detached.to_local()


def traced_spec(tensor: DTensor) -> object:
    """Traced: a spec equal to ``tensor._spec``, with the global shape and stride."""
    meta = dtensor_specs.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return dtensor_specs.DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)


def deep(tensor: DTensor) -> object:
    """Traced: a copy with memory of its own."""
    return tensor.detach().clone()


def shallow(tensor: DTensor) -> object:
    """Traced: another DTensor of the same memory."""
    return tensor.detach()


def _answer(function: Callable[[DTensor], Any]) -> Callable[..., Any]:
    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not dynamo_dtensors.is_tensor_of(args[0], DTensor):
            return None
        if dynamo_dtensors.requires_grad(args[0]):
            dynamo_building.graph_break(
                "Copy of a DTensor that requires gradients",
                "copy.deepcopy(x)",
                "The copy would be a leaf that collects gradients, which a compiled function "
                "cannot make.",
                "Copy it outside the compiled function, or copy x.detach().",
            )
        return dynamo_building.call_traced(tx, function, args, {})

    return answer


def is_of_a_subclass(value: object) -> bool:
    """Return whether it is a DTensor of a class of its own."""
    return isinstance(value, DTensor) and type(value) is not DTensor


def _refuse_subclasses(
    tx: InstructionTranslatorBase, value: object, source: Source
) -> VariableTracker:
    dynamo_building.graph_break(
        "Tensor of a subclass of DTensor",
        type(value).__name__,
        "A graph makes DTensors and knows nothing of a class that derives from it.",
        "Give the function a DTensor: DTensor.from_local(x.to_local(), x.device_mesh, "
        "x.placements)",
    )


def _refuse_data_sizes(operation: str) -> None:
    dynamo_building.graph_break(
        "Operation on DTensors whose result is as large as the data says",
        operation,
        "A graph needs the sizes of a DTensor, of all ranks together and of this rank's part. How "
        "large this result is, "
        "only the data tells.",
        "Use a form of a fixed size, such as torch.where(mask, x, 0) or torch.nonzero_static(x, "
        "size=n), or run the "
        "operation on x.full_tensor() or x.to_local().",
    )


_MIXED = "got mixed torch.Tensor and DTensor"


def once_more(run: Callable[[], object], arguments: object) -> object:
    """``run()``, a call with these arguments; a second time where it mixes what it makes with
    DTensors.

    No argument is written twice: a call that has written before it failed raises.
    """
    if not are_distributed(arguments):
        return run()
    before = _versions(arguments)
    try:
        return run()
    except RuntimeError as error:
        # torch has no class for this error. Which operators make tensors inside is not known before
        # they run: it depends on arguments, as in matrix_power of order 0.
        if _MIXED not in str(error) or _versions(arguments) != before:
            raise
    # Only in the second run: everywhere else a plain tensor among DTensors stays an error.
    with dtensor_dispatch.made_tensors_are_replicas():
        return run()


def _versions(arguments: object) -> list[int]:
    return [
        each._version
        for each in dtensor_dispatch.tree_leaves(arguments)
        if isinstance(each, torch.Tensor) and not each.is_inference()
    ]


def are_distributed(arguments: object) -> bool:
    """Return whether there are tensors, all of them DTensors."""
    tensors = [
        each for each in dtensor_dispatch.tree_leaves(arguments) if isinstance(each, torch.Tensor)
    ]
    return bool(tensors) and all(isinstance(each, DTensor) for each in tensors)


log = logging.getLogger(__name__)


def construct(local: torch.Tensor, spec: Any) -> DTensor:
    """Traced: the DTensor of the local tensor, without its autograd history, as the class makes
    it.
    """
    meta = spec.tensor_meta
    return DTensor.from_local(
        # The class's constructor is below autograd, and from_local is not.
        local.detach(),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=meta.shape,
        stride=meta.stride,
    )


_SIGNATURE = inspect.signature(lambda local_tensor, spec, *, requires_grad: None)


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the constructor; a new leaf that requires gradients breaks the graph."""
    try:
        bound = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # upstream raises what eager raises
    wanted = dynamo_building.constants([bound["requires_grad"]], {})
    if wanted is None or wanted[0][0]:
        dynamo_building.graph_break(
            "New DTensor that requires gradients",
            "DTensor(..., requires_grad=True)",
            "A tensor made inside a compiled function cannot be a leaf that collects gradients.",
            "Make it outside the compiled function, or make it without requires_grad and let an "
            "input that requires gradients take part: y = distribute_tensor(x.detach(), mesh, ...)",
        )
    return dynamo_building.call_traced(tx, construct, [bound["local_tensor"], bound["spec"]], {})


_FROM_LOCAL = inspect.signature(
    lambda local_tensor, device_mesh=None, placements=None, *, run_check=False, **others: None
)


def from_local(tx: object, args: list[object], kwargs: dict[str, object]) -> object:
    """``DTensor.from_local`` with the mesh of ``with mesh:``; a check over all ranks breaks the
    graph.
    """
    try:
        given = _FROM_LOCAL.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # upstream raises what eager raises
    if "run_check" in given and dynamo_building.constants([given["run_check"]], {}) != (
        [False],
        {},
    ):
        dynamo_building.graph_break(
            "DTensor.from_local with run_check",
            "DTensor.from_local(..., run_check=True)",
            "The check compares Python objects that all ranks send, which no graph can hold.",
            "Check once outside the compiled function, and inside it use "
            "DTensor.from_local(x, mesh, placements, run_check=False)",
        )
    _warn_of_another_cut(given)
    mesh = given.get("device_mesh")
    # A mesh that is given is upstream's to trace.
    if mesh is not None and dynamo_building.constants([mesh], {}) != ([None], {}):
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != "device_mesh"}
    mesh = dynamo_building.call_traced(tx, dynamo_dtensors.current_mesh, [], {})
    return dynamo_building.call_traced(tx, DTensor.from_local, [args[0], mesh, *args[2:]], kwargs)


def _warn_of_another_cut(given: dict[str, Any]) -> None:
    """Say where a local tensor is not this rank's part of the shape that is given with it, as torch
    cuts it.

    Not raised: no other rank would know of it.
    """
    local = given["local_tensor"]
    cut = [given.get("others", {}).get("shape"), given.get("device_mesh"), given.get("placements")]
    if None in cut or not dynamo_dtensors.is_tensor_of(local, torch.Tensor):
        return
    values = dynamo_building.constants(cut, {})
    if values is None or None in values[0]:
        return
    shape, mesh, placements = values[0]
    found = tuple(dynamo_building.fake_tensor(local).shape)
    if mesh.get_coordinate() is None or not all(isinstance(size, int) for size in found):
        return  # a rank that has no part, or sizes that are known when the graph runs
    part = dtensor_specs.own_shape(shape, mesh, placements)
    if found != part:
        log.warning(
            "DTensor.from_local got a local tensor of shape %s for shape %s and placements %s on "
            "%s, of which this "
            "rank's part is %s as torch cuts it: results are wrong where the DTensor is gathered "
            "or cut again. Cut as "
            "torch.chunk does, or pad the shards.",
            found,
            tuple(shape),
            tuple(placements),
            mesh,
            part,
        )


def patches(config: DistConfig) -> list[Patch]:
    """Everything to apply for DTensors, in order; nothing is applied here."""
    return [
        *dtensor_views.views_patches(),
        *dynamo_dtensors.on_tensor_attributes(has_tensor_attribute, attribute),
        *dynamo_trackers.on_construction(DTensor, answer),
        *dynamo_trackers.on_function(DTensor.from_local, from_local),
        *higher_order.branches_patches(),
        *dynamo_trackers.on_function(copy.deepcopy, _answer(deep)),
        *dynamo_trackers.on_function(copy.copy, _answer(shallow)),
        *dynamo_building.on_data_dependent_sizes(_refuse_data_sizes),
        *distribution.patches(),
        *contexts.debug_patches(),
        *placement.reduce_op_patches(),
        *contexts.loss_parallel_patches(),
        *contexts.implicit_replication_patches(),
        # The nodes that Dynamo tries out, and those that AOTAutograd traces.
        *dtensor_dispatch.around_traced_calls(once_more),
        *higher_order.regions_patches(),
        *dynamo_trackers.on_values(DTensor, is_of_a_subclass, _refuse_subclasses),
        *dtensor_views.unused_outputs_patches(),
        *aot_runtime.keep_first_symbols(),
        *aot_tracing.equal_meshes_are_one(),
        *dynamo_dtensors.sizes_of_bases_are_inputs(),
        *aot_runtime.write_to_pending_inputs(),
        *aot_runtime.pending_inputs_have_gradients(),
        *dtensor_placements.keep_strided_shards(),
        *dtensor_placements.cut_empty_shards(),
        *dtensor_placements.count_strided_shards_with_real_tensors(),
        *dtensor_placements.fix_split_factors(),
        *aot_partition.save_states_before_objects(),
        *aot_partition.draw_once(),
        *dtensor_ranks.random_on_cpu(),
    ]
