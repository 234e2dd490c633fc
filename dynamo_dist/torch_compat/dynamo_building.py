"""Steps that a tracker may take while tracing: values, inputs of the graph, sources."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch._dynamo.variables.builder as _builder
import torch.distributed.distributed_c10d as _c10d
from torch import fx
from torch._dynamo.exc import raise_observed_exception, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import (
    AttrSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    GlobalWeakRefSource,
    SkipGuardSource,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import SymNodeVariable
from torch._guards import TracingContext
from torch._library import opaque_object as _opaque
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import log_registry as _log_registry
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from dynamo_dist.torch_compat.dtensor_dispatch import tree_leaves
from dynamo_dist.torch_compat.dtensor_specs import _same_storage, may_overlap
from dynamo_dist.torch_compat.patching import _MISSING, Patch, Upstream, WrapFunction, _optional

if TYPE_CHECKING:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase


def probes() -> dict[str, bool]:
    """Tell what this torch has, by the names that ``doctor`` explains."""
    return {
        "custom_class_names": _OPAQUE.__name__.startswith("CustomClass"),
        "getattro_protocol": HAS_GETATTRO_PROTOCOL,
        "short_log_names": _log_registry.is_log("dist"),
    }


# One opaque-object tracker for all three, renamed in 2.14.
_OPAQUE = _optional(
    "torch._dynamo.variables.script_object",
    "CustomClassObjectVariable",  # 2.14
    "TorchScriptObjectVariable",
)
_OPAQUE_CLASS = _optional(
    "torch._dynamo.variables.script_object",
    "CustomClassVariable",  # 2.14
    "OpaqueObjectClassVariable",
)
HAS_GETATTRO_PROTOCOL = hasattr(VariableTracker, "tp_getattro_impl")


def unwrap(value: object) -> Any:
    """The object that Dynamo's stand-in for an opaque object stands for; other values as they
    are.
    """
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def target_name(node: fx.Node) -> str:
    """Return the name of the function or method that a node of Dynamo's graph calls."""
    return str(getattr(node.target, "__name__", node.target))


def inputs_follow(gm: fx.GraphModule) -> bool:
    """Return whether Dynamo will load what placeholders ``gm`` has once the backend is done with
    it.

    ``OutputGraph.graphargs`` reads them off the graph, which was seen in 2.13 to 2.15.
    """
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # outside of a frame
        return False
    return output.graph is gm.graph and len(output.graphargs) == len(output.placeholders)


def source_of_input(placeholder: fx.Node) -> object:
    """Return the source from which Dynamo loads an input of its graph; None if it does not say."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def build(tx: Any, value: object, source: Any = None) -> Any:
    """The tracker of ``value``; with a source, guarded as upstream guards it."""
    return VariableTracker.build(tx, value, source)


def attribute_source(tracker: VariableTracker, name: str) -> Any:
    """Return the source of ``tracker.name``; None if that of ``tracker`` is not known."""
    return AttrSource(tracker.source, name) if tracker.source is not None else None


def imported_source(tx: Any, module: str, *path: str) -> object:
    """The source of ``module.path[0].path[1]...``."""
    source = tx.import_source(module)
    for name in path:
        source = AttrSource(source, name)
    return source


def default_group_source(tx: InstructionTranslatorBase) -> object:
    """The source of the default group: where c10d keeps it, not the properties that look there."""
    # Ranks that are threads of one process have a world each, which keeps no group itself.
    world = vars(_c10d).get("_world")
    path = ("_world", "_default_pg") if "_default_pg" in vars(world) else ("GroupMember", "WORLD")
    return imported_source(tx, _c10d.__name__, *path)


def build_by_weakref(tx: InstructionTranslatorBase, value: object) -> VariableTracker:
    """The tracker of an object that no variable of the program holds; guarded: it is alive."""
    reference = weakref.ref(value)
    # Upstream numbers the names of its globals anew each time that it starts over. It remembers
    # by the names of sources which numbers are no inputs, and would start over for each of them.
    first, references = vars(tx.speculation_log).setdefault(
        "_dynamo_dist_references", (tx.output.compile_id, {})
    )
    references[id(reference)] = reference  # alive, so that the next trace finds the same one
    name = f"__dynamo_dist_{id(reference)}_c{first}"
    if name not in tx.output.global_scope:
        tx.output.install_global_unsafe(name, reference)
    source = GlobalWeakRefSource(name)
    install_guard(source.make_guard(GuardBuilder.WEAKREF_ALIVE))
    return VariableTracker.build(tx, value, source, realize=True)


def build_unchanging(tx: InstructionTranslatorBase, value: object) -> Any:
    """Build the tracker of an object that outlives the code and does not change, without guards."""
    name = tx.output.install_global_by_id("__dynamo_dist", value)
    return VariableTracker.build(tx, value, SkipGuardSource(GlobalSource(name)), realize=True)


def member_source(source: Any, *path: str | int) -> object:
    """The source of ``source.a[0].b`` for the path ("a", 0, "b")."""
    for name in path:
        source = AttrSource(source, name) if isinstance(name, str) else GetItemSource(source, name)
    return source


def build_item(tx: Any, tracker: VariableTracker, name: str, key: str) -> object:
    """The tracker of ``tracker.name[key]``, ``name`` being a dictionary of the object's own."""
    value = vars(python_object(tracker))[name][key]
    source = attribute_source(tracker, name)
    return build(tx, value, None if source is None else DictGetItemSource(source, key))


def build_list(tx: Any, items: list[object]) -> Any:
    """A new list of trackers, as the traced program makes one."""
    made = build(tx, [])
    for item in items:
        made.call_method(tx, "append", [item], {})
    return made


def build_dict(tx: object, items: Mapping[str, object]) -> object:
    """A new dictionary of trackers by name, as the traced program makes one."""
    made = build(tx, {})
    for name, item in items.items():
        made.call_method(tx, "__setitem__", [build(tx, name), item], {})
    return made


def attribute_so_far(tx: Any, value: object, name: str) -> Any:
    """Return an object's attribute as the traced program has set it so far, or as it is."""
    effects = tx.output.side_effects
    tracker = effects.id_to_variable.get(id(value))
    if tracker is not None and effects.has_pending_mutation_of_attr(tracker, name):
        found = realized(effects.load_attr(tracker, name))
        # What the program computed from a size or a counter is one value from here on, by a guard.
        if isinstance(found, SymNodeVariable):
            return found.evaluate_expr(tx.output)
        return found.as_python_constant()
    return getattr(value, name)


def set_after_graph(tx: Any, tracker: Any, name: str, value: Any) -> None:
    """Have the compiled function set ``object.name`` when its graph has run; a property's setter
    is called then.
    """
    tx.output.side_effects.store_attr(tracker, name, value)


def build_callable(answer: Callable[..., Any]) -> object:
    """A tracker that answers a call with ``answer(*args, **kwargs)``."""
    return LambdaVariable(answer)


def note_rank_dependent() -> None:
    """Say that the program asks for its rank: on another rank the graph may be another one."""
    TracingContext.get().dist_rank_dependent = True  # type: ignore[attr-defined]


def is_literal(value: object) -> bool:
    """Return whether upstream's ``ConstantVariable`` may hold this value."""
    return bool(ConstantVariable.is_literal(value))


def is_upstreams_member(tracker: Any, name: str) -> bool:
    """Return whether torch has registered this member of a mesh."""
    info = _opaque.get_opaque_obj_info(type(tracker.real))
    return info is not None and name in info.members


def is_inlined_member(value: object, name: str) -> bool:
    """Return whether torch registered this member as Python code to be traced, not as a
    constant.
    """
    info = _opaque.get_opaque_obj_info(type(value))
    return info is not None and info.members.get(name) is _opaque.MemberType.INLINED


def constants(
    args: list[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments' values if all are constants while tracing; else None."""
    try:
        return (
            [arg.as_python_constant() for arg in args],
            {name: arg.as_python_constant() for name, arg in kwargs.items()},
        )
    except NotImplementedError:
        return None


def missing_attribute(tx: InstructionTranslatorBase, value: object, name: str) -> NoReturn:
    """Raise, in the traced program, the AttributeError that eager raises."""
    message = f"{type(value).__name__!r} object has no attribute {name!r}"
    raise_observed_exception(AttributeError, tx, args=[message])
    raise AssertionError("raise_observed_exception returned")


def raise_in_program(tx: InstructionTranslatorBase, error: Exception) -> NoReturn:
    """Raise ``error`` in the traced program, which may catch it."""
    raise_observed_exception(type(error), tx, args=[str(arg) for arg in error.args])
    raise AssertionError("raise_observed_exception returned")


def graph_break(kind: str, context: str, explanation: str, fix: str) -> NoReturn:
    """Break the graph. ``kind`` is fixed text, without names or shapes, so that breaks can be
    counted.
    """
    unimplemented(gb_type=kind, context=context, explanation=explanation, hints=[fix])
    raise AssertionError("unimplemented returned")


def fake_tensor(tracker: Any) -> torch.Tensor:
    """The stand-in of one tensor."""
    return realized(tracker).as_proxy().node.meta["example_value"]


def realized(tracker: object) -> Any:
    """The tracker itself; a lazy one installs its guards."""
    return tracker.realize() if hasattr(tracker, "realize") else tracker


def call_traced(tx: Any, function: Any, args: list[Any], kwargs: Mapping[str, object]) -> object:
    """Trace a plain Python function of ours as if the program had called it here."""
    return build(tx, function).call_function(tx, args, kwargs)


def items_of(tx: Any, tracker: Any) -> list[object]:
    """The trackers in a traced list or tuple."""
    return [realized(item) for item in realized(tracker).unpack_var_sequence(tx)]


def python_object(tracker: Any) -> Any:
    """The object that a tracker stands for, without a guard; raises NotImplementedError for
    none.
    """
    tracker = realized(tracker)
    value = getattr(tracker, "value", _MISSING)
    return tracker.as_python_constant() if value is _MISSING else unwrap(value)


def value_of(tracker: VariableTracker) -> object:
    """The object that a tracker keeps, if it keeps one; no guard is installed."""
    return getattr(tracker, "value", None)


# Calls on a tensor that tell of its sizes, or make one like it, without reading it.
_METADATA = frozenset(
    "size stride dim numel storage_offset is_contiguous new_empty new_zeros new_ones new_full "
    "empty_like zeros_like ones_like full_like rand_like randn_like".split()
)


def fake_tensors(tx: InstructionTranslatorBase, tracker: VariableTracker) -> list[torch.Tensor]:
    """The stand-ins of the tensors in a traced list: their sizes, strides and shared storages."""
    return [fake_tensor(item) for item in items_of(tx, tracker)]


def on_tensor_uses(watched: Callable[[Any], list[Any]], used: Callable[..., None]) -> list[Patch]:
    """Call ``used(tx, owner)`` where a traced operation reads or writes a watched tensor.

    ``watched(tx)`` gives pairs of a tensor's stand-in and an owner; taking a view is no use. Every
    traced operation passes through ``get_fake_value``, with the stand-ins of its arguments.
    """

    def get_fake_value(
        upstream: Upstream, node: Any, tx: Any, *args: object, **kwargs: object
    ) -> object:
        state = vars(tx.output).get("_dynamo_dist")
        pairs = watched(state) if state is not None else []
        if not pairs:
            return upstream(node, tx, *args, **kwargs)
        inputs = [
            arg.meta["example_value"]
            for arg in node.all_input_nodes
            if isinstance(arg.meta.get("example_value"), torch.Tensor)
        ]
        hits = [
            (tensor, tensor._version, owner)
            for tensor in inputs
            for buffer, owner in pairs
            if may_overlap(tensor, buffer)
        ]
        value = upstream(node, tx, *args, **kwargs)
        for tensor, version, owner in hits:
            if not _reads_no_data(node, value, tensor) or tensor._version != version:
                used(tx, owner)
        return value

    return [WrapFunction(_builder, "get_fake_value", get_fake_value)]


def on_data_dependent_sizes(refuse: Callable[[str], None]) -> list[Patch]:
    """Call ``refuse(operation)`` where an operation on DTensors returns one of data-dependent size.

    Such a size is a symbol that no argument has. DTensor makes one for the global size and another
    for the local one, and Dynamo fails on the first. Indexing by a mask fails sooner or later, by
    how the mask is laid out. ``get_fake_value`` and ``free_unbacked_symbols`` were seen in 2.13 to
    2.15.
    """

    def get_fake_value(
        upstream: Upstream,
        node: fx.Node,
        tx: InstructionTranslatorBase,
        *args: object,
        **kwargs: object,
    ) -> object:
        given = [each.meta.get("example_value") for each in node.all_input_nodes]
        # No tree is looked through where there is none: every operation of every program passes
        # here.
        kinds = (DTensor, list, tuple)
        if not any(isinstance(each, kinds) for each in given) or not any(
            isinstance(each, DTensor) for each in tree_leaves(given)
        ):
            return upstream(node, tx, *args, **kwargs)
        if _indexes_by_mask(node):
            refuse("indexing by a mask")
        value = upstream(node, tx, *args, **kwargs)
        made = _unbacked([each for each in tree_leaves(value) if isinstance(each, DTensor)])
        if made and made - _unbacked(given):
            refuse(target_name(node))
        return value

    return [WrapFunction(_builder, "get_fake_value", get_fake_value)]


def _indexes_by_mask(node: fx.Node) -> bool:
    if target_name(node) not in ("getitem", "__getitem__"):
        return False
    values = (getattr(each, "meta", {}).get("example_value") for each in tree_leaves(node.args[1:]))
    return any(
        isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        for each in values
    )


def _unbacked(value: object) -> set[object]:
    """Return the unbacked symbols among numbers and sizes: of DTensors, global and local sizes."""
    found: set[Any] = set()
    for each in tree_leaves(value):
        sizes: tuple[object, ...] = (each,)
        if isinstance(each, torch.Tensor):
            sizes = tuple(each.shape)
        if isinstance(each, DTensor):
            sizes += tuple(each._local_tensor.shape)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                found.update(free_unbacked_symbols(size))
    return found


def _reads_no_data(node: fx.Node, value: object, of: torch.Tensor) -> bool:
    if target_name(node) in _METADATA:
        return True
    results = value if isinstance(value, (list, tuple)) else [value]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return bool(tensors) and all(_same_storage(tensor, of) for tensor in tensors)
