"""Private torch names that lowering needs: functions traced as ours, and work in flight."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._C._distributed_c10d as _distributed_c10d
import torch._dynamo.config as _dynamo_config
import torch._dynamo.variables.builder as _builder
import torch._dynamo.variables.higher_order_ops as _higher_order_ops
import torch._functorch.partitioners as _partitioners
import torch.distributed.distributed_c10d as _c10d
import torch.distributed.nn.functional as _nn_functional
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_call_method,
    create_instruction,
)
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.distributed import BackwardHookVariable
from torch._dynamo.variables.misc import (
    AutogradFunctionContextVariable,
    AutogradFunctionVariable,
)
from torch._dynamo.variables.nn_module import NNModuleVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.function import _is_setup_context_defined
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dynamo_dist._torch import Change as Change
from dynamo_dist._torch import Made, SetAttribute, SetItem, WrapAttribute
from dynamo_dist.trackers._torch import VALUE_MATCH, realized
from dynamo_dist.trackers._torch import build as build
from dynamo_dist.trackers._torch import build_callable as build_callable
from dynamo_dist.trackers._torch import build_list as build_list
from dynamo_dist.trackers._torch import call_traced as call_traced
from dynamo_dist.trackers._torch import fake_tensor as fake_tensor
from dynamo_dist.trackers._torch import graph_break as graph_break
from dynamo_dist.trackers._torch import guard_source as guard_source
from dynamo_dist.trackers._torch import imported_source as imported_source
from dynamo_dist.trackers._torch import items_of as items_of
from dynamo_dist.trackers._torch import on_function as on_function
from dynamo_dist.trackers._torch import on_values as on_values
from dynamo_dist.trackers._torch import python_object as python_object
from dynamo_dist.trackers._torch import resolve_process_group as resolve_process_group

register_work: Callable[[torch.Tensor, Any], None] = vars(_distributed_c10d)["_register_work"]
premul_sum: Callable[[float], Any] = vars(_distributed_c10d)["_make_nccl_premul_sum"]


def c10d_function(name: str) -> Any:
    """A function of ``torch.distributed.distributed_c10d``, private ones too; None if it has none."""
    return getattr(_c10d, name, None)


nn_functional_module: Any = _nn_functional


def nn_function(name: str) -> Any:
    """An autograd function of ``torch.distributed.nn.functional``."""
    return getattr(_nn_functional, f"_{name}")


def collective_options(kind: str) -> Any:
    """New options of a backend's collective: ``kind`` is "Allreduce", "Barrier" and so on."""
    return getattr(_distributed_c10d, f"{kind}Options")()


def reduce_scatter_of(group: Any) -> Any:
    """The group's reduce-scatter of one tensor into one; renamed in 2.13."""
    name = "reduce_scatter_single"
    return getattr(group, name) if hasattr(group, name) else group._reduce_scatter_base


class ObjectTracker(BackwardHookVariable):
    """An object that exists while tracing only; its members and its way out are the subclass's hooks.

    It is true. Up to 2.12 stock's hooks are the one class that no table holds and every condition takes.
    """

    def __init__(self, **options: Any) -> None:
        VariableTracker.__init__(self, **options)

    def as_proxy(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} is no value of a graph")

    def attribute(self, tx: Any, name: str) -> Any:
        """Hook: the tracker of an attribute, bound methods included."""
        raise NotImplementedError

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Hook: the result of a method call."""
        raise NotImplementedError

    def traced_type(self) -> type:
        """Hook: what ``type()`` gives."""
        raise NotImplementedError

    def python_type(self) -> type:
        return self.traced_type()

    def var_getattr(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.method(tx, name, list(args), kwargs)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return ConstantVariable.create(hasattr(self.traced_type(), name))

    def is_python_hashable(self) -> bool:
        return True

    def get_python_hash(self) -> int:
        return id(self)

    def is_python_equal(self, other: object) -> bool:
        return self is other


def construct(codegen: Any, cls: type, args: list[Any]) -> None:
    """Make ``cls(*args)`` when the compiled function returns; a function in ``args`` is imported."""
    codegen.add_push_null(lambda: codegen.load_import_from(cls.__module__, cls.__name__))
    for arg in args:
        if inspect.isfunction(arg):
            codegen.load_import_from(arg.__module__, arg.__name__)
        else:
            codegen(arg)
    codegen.extend_output(create_call_function(len(args), False))


def call_before_graph(tx: Any, source: Any, method: str) -> None:
    """Have ``source.method()`` called each time the compiled function starts, before its graph."""
    codegen = PyCodegen(tx.output.root_tx)
    codegen(source)
    codegen.load_method(method)
    codegen.extend_output(create_call_method(0))
    codegen.append_output(create_instruction("POP_TOP"))
    tx.output.pregraph_bytecode.extend(codegen.get_instructions())


def trace_state(tx: Any, make: Callable[[], Any]) -> Any:
    """Return the state that we keep for one trace; made anew when Dynamo starts over."""
    state = vars(tx.output).get("_dynamo_dist")
    if state is None:
        state = tx.output._dynamo_dist = make()
    return state


def is_subclass_instance(tracker: Any) -> bool:
    """Return whether it tracks a tensor of a class that may answer c10d calls itself, such as DTensor."""
    tracker = realized(tracker)
    if not isinstance(tracker, TensorVariable):
        return False
    return tracker.python_type() not in (torch.Tensor, torch.nn.Parameter)


def user_line(tx: Any, ours: str) -> str:
    """``file:line in function`` of the innermost traced frame outside the folder ``ours``."""
    frame = tx
    while frame is not None:
        if not frame.f_code.co_filename.startswith(ours) or frame.parent is None:
            break
        frame = frame.parent
    return f"{frame.f_code.co_filename}:{frame.lineno} in {frame.f_code.co_name}"


def trackers_in_use(tx: Any) -> set[int]:
    """Ids of the trackers that the code after this point, or the caller, can still reach."""
    found: set[int] = set()
    cache: dict[int, Any] = {}
    effects, frame = tx.output.side_effects, tx
    roots: list[Any] = []
    while frame is not None:
        frame.prune_dead_locals()
        roots += [frame.stack, dict(frame.symbolic_locals)]
        frame = frame.parent
    effects.prune_dead_object_new(tx)
    roots += [dict(effects.id_to_variable), list(effects.store_attr_mutations)]
    roots += [dict(values) for values in effects.store_attr_mutations.values()]
    for root in roots:
        VariableTracker.visit(lambda each: found.add(id(each)), root, cache)
    return found


def on_graph_end(before: Callable[[Any], None], after: Callable[[Any], None]) -> list[Change]:
    """Call ``before(tx)`` and ``after(tx)`` around the end of a graph, at a return or a graph break."""
    stock = OutputGraph.compile_subgraph

    @functools.wraps(stock)
    def compile_subgraph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if "_dynamo_dist" not in vars(self):
            return stock(self, tx, *args, **kwargs)
        before(tx)
        result = stock(self, tx, *args, **kwargs)
        after(tx)
        return result

    return [SetAttribute(OutputGraph, "compile_subgraph", compile_subgraph)]


def on_object(value: object, make: Callable[[Any, Any], Any]) -> list[Change]:
    """Track one object by ``make(tx, source)``."""
    return [
        SetItem(
            VariableBuilder._id_dispatch(),
            id(value),
            lambda builder, _: make(builder.tx, builder.source),
            of=value,
        )
    ]


def allow_point_to_point() -> list[Change]:
    """Let stock construct ``P2POp`` while tracing; before 2.12 it has no switch for that."""
    if "enable_p2p_compilation" not in _dynamo_config._config:  # type: ignore[attr-defined]
        return []
    return [ConfigDefault(_dynamo_config, "enable_p2p_compilation", True)]


class ConfigDefault(Made):
    """Another default for an entry of a torch config module, for every thread."""

    def __init__(self, config: Any, name: str, value: object) -> None:
        self.entry, self.name, self.value = config._config[name], name, value

    def apply(self) -> None:
        self.before = self.entry.default
        self.entry.default = self.value

    def undo(self) -> None:
        self.entry.default = self.before


_LAUNCHING = ("_c10d_functional", "_dtensor")  # namespaces of torch's ops that communicate


def value_guard(what: str, read: Callable[[Any], Any], hold: bool = False) -> Callable[..., None]:
    """``VALUE_MATCH`` of ``read(object)``, for ``guard`` and ``guard_source``."""
    return functools.partial(VALUE_MATCH, what=what, read=read, hold=hold)


def keep_in_its_pass(own: str) -> list[Change]:
    """Keep launches in the pass, forward or backward, that launched them, and launch them once.

    The partitioner copies into the backward whatever it can compute there, dead launches too, and moves
    to the forward what does not depend on a gradient. What it can compute where depends on sizes, which
    are other ones on another rank. ``own`` is the namespace of our ops, which it takes for ops without
    effects. Seen in 2.11 to 2.15; where the predicates are missing nothing is changed.
    """
    changes: list[Change] = []
    if not hasattr(_partitioners, "_has_tag_is_forward"):
        return changes
    for name, part in (("_must_be_in_forward", "forward"), ("_must_be_in_backward", "backward")):
        if (stock := getattr(_partitioners, name, None)) is not None:
            kept = functools.partial(_kept, stock, own, part)
            changes.append(SetAttribute(_partitioners, name, kept))
    return changes


def _kept(stock: Callable[[Any], bool], own: str, part: str, node: Any) -> bool:
    namespace, tag = getattr(node.target, "namespace", None), node.meta.get("partitioner_tag")
    if namespace == own:
        # What an autograd function traced in its backward may bear no tag; all of the forward does.
        return (tag in ("is_forward", "must_be_in_forward")) == (part == "forward")
    if namespace in _LAUNCHING and not _partitioners.must_recompute(node):
        return tag == f"is_{part}" or stock(node)
    return stock(node)


def drop_dead_chains() -> list[Change]:
    """Let the partitioner drop the computation between dead launches, and so the launches before it.

    It copies into the backward what it can compute there, and drops the launches that are dead. What is no
    launch it keeps, dead or not, so that a launch whose result goes into a dead one would run twice. Seen
    in 2.11 to 2.15; where the predicate is missing nothing is changed.
    """
    stock = getattr(_partitioners, "is_not_collective", None)
    if stock is None:
        return []
    return [
        SetAttribute(
            _partitioners, "is_not_collective", lambda node: stock(node) and node.is_impure()
        )
    ]


def on_text(classes: tuple[type, ...], create: Callable[..., None]) -> list[Change]:
    """``str(value)`` of values of these classes as a constant that ``create`` guards, where stock breaks.

    Up to 2.12 stock looks for a Python method; later torches ask the object's tracker.
    """
    if hasattr(VariableTracker, "str_impl") or hasattr(VariableTracker, "tp_str_impl"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call_str(self: Any, tx: Any, arg: Any) -> Any:
            tracker = realized(arg)
            value = getattr(tracker, "value", None)
            if not isinstance(value, classes):
                return stock(self, tx, arg)
            guard_source(tracker.source, create)
            return build(tx, str(value))

        return call_str

    return [WrapAttribute(BuiltinVariable, "call_str", changed), ForgetHandlers()]


class ForgetHandlers:
    """Drop what stock remembers of how builtins are traced, when a way is changed and changed back."""

    def apply(self) -> None:
        BuiltinVariable.call_function_handler_cache.clear()

    undo = apply


def return_no_aliases() -> list[Change]:
    """Let the forward of an autograd function return what it made once, not again by another name.

    Up to 2.11 every tensor it made is returned from it, what an in-place op gave too. That is the very
    tensor that the op wrote to; its gradients then go to the last of its names, and are lost. Later
    torches leave out what shares memory with an input or another output.
    """
    owner = _higher_order_ops.AutogradFunctionApplyVariable
    name: Any = getattr(owner, "_HOP_NAME", None)
    if name is None or "filter_aliased" in inspect.getsource(owner.trace_forward_graph):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def collect(tx: Any, subtracer: Any, outputs: Any, *rest: Any) -> list[Any]:
            found: list[Any] = stock(tx, subtracer, outputs, *rest)
            if subtracer.source_target != name:
                return found
            value = "example_value"
            nodes = tx.output.graph.find_nodes(op="placeholder")
            nodes += [output.as_proxy().node for output in outputs]
            seen = {key for node in nodes for key in _storages(node.meta.get(value))}
            kept = []
            for tracker in found:
                keys = _storages(tracker.as_proxy().node.meta.get(value))
                if not keys & seen:
                    kept.append(tracker)
                    seen |= keys
            return kept

        return collect

    return [WrapAttribute(_higher_order_ops, "collect_intermediate_outputs", changed)]


def pass_context() -> list[Change]:
    """Trace the forward of an autograd function without gradients with its context, and only with its own.

    Up to 2.14 stock counts the arguments to tell whether the forward takes a context, which is wrong where
    it takes any number of tensors: the backward of a gather to two ranks loses it.
    """
    owner = AutogradFunctionVariable
    if "len(args) - 1 == len(sig.parameters)" not in inspect.getsource(owner.call_apply):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call_apply(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            forward = self.fn_cls.forward
            takes_context = not _is_setup_context_defined(self.fn_cls.setup_context)
            if (
                kwargs
                or not inspect.isfunction(forward)
                or takes_context == (len(args) != len(inspect.signature(forward).parameters))
                or (torch.is_grad_enabled() and _may_need_gradient(args))
            ):
                return stock(self, tx, args, kwargs)
            source = self.source and AttrSource(self.source, "forward")
            context = [AutogradFunctionContextVariable.create(tx, args, kwargs)]
            function = VariableTracker.build(tx, forward, source=source, realize=True)
            return function.call_function(tx, [*context[:takes_context], *args], {})

        return call_apply

    return [WrapAttribute(owner, "call_apply", changed)]


def _may_need_gradient(args: Any) -> bool:
    found = []

    def visit(tracker: Any) -> None:
        if isinstance(tracker, NNModuleVariable):
            found.append(True)
        elif isinstance(tracker, TensorVariable):
            found.append(tracker.requires_grad is not False)

    VariableTracker.visit(visit, args)
    return any(found)


def _storages(value: Any) -> set[Any]:
    """The storages of a tensor, those inside a subclass's wrapper too; none of what is no tensor."""
    if not isinstance(value, torch.Tensor):
        return set()
    if not is_traceable_wrapper_subclass(value):
        return {StorageWeakRef(value.untyped_storage())}
    names, _ = value.__tensor_flatten__()
    return {key for name in names for key in _storages(getattr(value, name))}


def write_to_in_flight() -> list[Change]:
    """Let in-place ops on a tensor in flight that enters a graph write to the tensor itself.

    From 2.12 on AOTAutograd waits for such inputs before the graph. Up to 2.11 the graph does, and what
    it waits for is another tensor, so that a write to that is lost.
    """
    if hasattr(ViewAndMutationMeta, "act_input_indices"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def dispatch(
            func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func._schema.is_mutable:
                for tensor in tree_leaves((args, kwargs)):
                    if not isinstance(tensor, AsyncCollectiveTensor) or tensor.completed:
                        continue
                    if isinstance(tensor.elem, FunctionalTensor):
                        tensor.elem.copy_(tensor.trigger_wait())
                    elif isinstance(tensor.elem, FakeTensor):
                        tensor.completed = True  # what the graph made of it is written back
            return stock(func, types, args, kwargs)

        return staticmethod(dispatch)

    return [WrapAttribute(AsyncCollectiveTensor, "__torch_dispatch__", changed)]


# Calls on a tensor that tell of its sizes, or make one like it, without reading it.
_METADATA = frozenset(
    "size stride dim numel storage_offset is_contiguous new_empty new_zeros new_ones new_full "
    "empty_like zeros_like ones_like full_like rand_like randn_like".split()
)


def fake_tensors(tx: Any, tracker: Any) -> list[torch.Tensor]:
    """The stand-ins of the tensors in a traced list: their sizes, strides and shared storages."""
    return [fake_tensor(item) for item in items_of(tx, tracker)]


def on_tensor_uses(watched: Callable[[Any], list[Any]], used: Callable[..., None]) -> list[Change]:
    """Call ``used(tx, owner)`` where a traced operation reads or writes a watched tensor.

    ``watched(tx)`` gives pairs of a tensor's stand-in and an owner; taking a view is no use. Every
    traced operation passes through ``get_fake_value``, with the stand-ins of its arguments.
    """
    stock: Any = vars(_builder)["get_fake_value"]

    @functools.wraps(stock)
    def get_fake_value(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        state = vars(tx.output).get("_dynamo_dist")
        pairs = watched(state) if state is not None else []
        if not pairs:
            return stock(node, tx, *args, **kwargs)
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
        value = stock(node, tx, *args, **kwargs)
        for tensor, version, owner in hits:
            if not _reads_no_data(node, value, tensor) or tensor._version != version:
                used(tx, owner)
        return value

    return [SetAttribute(_builder, "get_fake_value", get_fake_value)]


def _reads_no_data(node: Any, value: Any, of: torch.Tensor) -> bool:
    if getattr(node.target, "__name__", node.target) in _METADATA:
        return True
    results = value if isinstance(value, (list, tuple)) else [value]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return bool(tensors) and all(_same_storage(tensor, of) for tensor in tensors)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two stand-ins share memory; True where symbolic sizes or strides leave it open."""
    try:
        if not _same_storage(a, b):
            return False
    except NotImplementedError:  # no storage: a subclass's wrapper
        return a is b
    if a.dtype != b.dtype and a.element_size() != b.element_size():
        return True
    return _ranges_meet(_extent(a), _extent(b)) and not _apart_in_a_dimension(a, b)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last element within the storage; None if not known while tracing."""
    if not all(
        isinstance(n, int) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    ):
        return None
    if tensor.numel() == 0:
        return (0, -1)
    first: Any = tensor.storage_offset()
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, last


def _ranges_meet(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    if a is None or b is None:
        return True
    return a[0] <= a[1] and b[0] <= b[1] and a[0] <= b[1] and b[0] <= a[1]


def _apart_in_a_dimension(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether equal strides show two slices of one tensor to be disjoint, such as column blocks."""
    if a.stride() != b.stride() or _extent(a) is None or _extent(b) is None:
        return False
    at, bt = a.storage_offset(), b.storage_offset()
    for step, n, m in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        if step <= 0:
            return False
        start, other = at // step, bt // step
        if start + n <= other or other + m <= start:
            return True
        at, bt = at % step, bt % step
    return False
