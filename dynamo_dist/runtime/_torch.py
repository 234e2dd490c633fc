"""Private torch names of guards, of DTensor's wrapping, of gradients and of compiled code.

Seen in torch 2.11 to 2.15; what a torch lacks leaves stock's way in place.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch._dynamo.guards as _guards
import torch._dynamo.source as _sources
from torch import fx
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import GuardsSet, TracingContext
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec

from dynamo_dist import versions
from dynamo_dist._torch import Change, SetAttribute, WrapAttribute
from dynamo_dist._torch import Check as Check
from dynamo_dist._torch import same_or as same_or

# Where a hook's cells are read from; None where hooks keep stock's guards. Torch 2.11 skips a check of a
# function in a dictionary as long as the dictionary is the same.
_CELL = (
    getattr(_sources, "CellContentsSource", None)
    if (versions.parse(torch.__version__) or (0, 0)) >= (2, 12)
    else None
)


# --- Guards ----------------------------------------------------------------------------------------


# What guards a DTensor's spec, and an object that Dynamo takes as it is (a mesh, a group, from 2.12).
VALUE_GUARDS = tuple(
    name
    for name in ("DTENSOR_SPEC_MATCH", "OPAQUE_OBJ_GUARD_FN_MATCH")
    if hasattr(GuardBuilder, name)
)


def wrap_checks(name: str, wrap: Callable[[Any, Check], Check]) -> Change:
    """``wrap(value, check)`` stands for the check of each guard of this kind, made for ``value``."""
    stock = getattr(GuardBuilder, name)

    @functools.wraps(stock)
    def build(self: Any, guard: Any) -> None:
        stock(_Builder(self, self.get(guard), wrap), guard)

    return SetAttribute(GuardBuilder, name, build)


class _Builder:
    """A GuardBuilder whose managers wrap the checks that they are given."""

    def __init__(self, builder: Any, value: Any, wrap: Callable[..., Any]) -> None:
        self.builder, self.value, self.wrap = builder, value, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def get_guard_manager(self, guard: Any) -> Any:
        return _Manager(self.builder.get_guard_manager(guard), self.value, self.wrap)


class _Manager:
    def __init__(self, manager: Any, value: Any, wrap: Callable[..., Any]) -> None:
        self.manager, self.value, self.wrap = manager, value, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def add_lambda_guard(self, check: Callable[[Any], bool], *rest: Any) -> Any:
        return self.manager.add_lambda_guard(self.wrap(self.value, check), *rest)


def leave_out(unneeded: Callable[[Any], bool]) -> Change:
    """Do not collect guards that are ``unneeded``."""

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def add(self: Any, guard: Any, *args: Any, skip: int = 0, **options: Any) -> None:
            if not unneeded(guard):
                stock(self, guard, *args, skip=skip + 1, **options)

        return add

    return WrapAttribute(GuardsSet, "add", changed)


def module_and_member(guard: Any) -> tuple[str, str | None] | None:
    """The module in whose traced code the guarded thing was named, and the global's name in it.

    None for what the compiled frame itself names; the global is None for the module itself.
    """
    member = None
    for source in _chain(guard.originating_source):
        if isinstance(source, _sources.GlobalSource):
            alias = source.global_name
            if not alias.startswith(_IMPORTED):
                return None
            return alias.removeprefix(_IMPORTED).replace("_dot_", "."), member
        member = getattr(source, "member", None)
    return None


_IMPORTED = "__import_"  # and the module's name, with "_dot_" for each dot


def is_on_code(guard: Any) -> bool:
    """Return whether it guards that a module, a class, a function or an operator is the same."""
    return guard.create_fn_name() in _CODE_MATCHES


_CODE_MATCHES = {
    "MODULE_MATCH",
    "CLASS_MATCH",
    "CLOSURE_MATCH",
    "FUNCTION_MATCH",
    "BUILTIN_MATCH",
    "DUPLICATE_INPUT",
}


def guards() -> Any:
    """The guards collected for the frame being compiled, a set; None outside a compile."""
    context = TracingContext.try_get()
    return None if context is None else context.guards_context.dynamo_guards


def cell_of(guard: Any) -> Any:
    """The outermost source above the guard's that is the content of a closure cell, or None."""
    found = None
    for source in _chain(guard.originating_source):
        if _CELL is not None and isinstance(source, _CELL):
            found = source
    return found


def function_of(cell: Any) -> Any:
    """The source of the function in whose closure a cell is; None if it is not read from there."""
    closure = getattr(cell.base, "base", None)
    return closure.base if isinstance(closure, _sources.ClosureSource) else None


def index_of(cell: Any) -> int:
    """Return the index of a cell among the function's cells."""
    index: int = cell.base.index
    return index


def is_code_match(guard: Any) -> bool:
    """Return whether the guard is on a function, that it has the same code."""
    return bool(guard.create_fn_name() == "CLOSURE_MATCH")


def attribute_above(source: Any, members: Collection[str]) -> Any:
    """``source`` or the first one above it that is an attribute of such a name; None without one."""
    for step in _chain(source):
        if isinstance(step, _sources.AttrSource) and step.member in members:
            return step
    return None


def is_on_size_or_type(guard: Any) -> bool:
    """Return whether it guards a dictionary's type, its size, or that a key is not in it."""
    return guard.create_fn_name() in _SIZE_OR_TYPE


_SIZE_OR_TYPE = {
    "TYPE_MATCH",
    "SEQUENCE_LENGTH",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "DICT_NOT_CONTAINS",
}


def member_names(source: Any) -> set[str]:
    """The attributes on the way from the frame's variables to ``source``."""
    return {step.member for step in _chain(source) if isinstance(step, _sources.AttrSource)}


def is_on(guard: Any, member: str) -> bool:
    """Return whether the guard is on an attribute of this name."""
    return getattr(guard.originating_source, "member", None) == member


def owner(guard: Any) -> Any:
    """The source of the object whose attribute the guard is on."""
    return guard.originating_source.base


# A number that a dictionary has until it changes, and that no other ever has; None where this torch has none.
dict_version: Any = getattr(torch._C._dynamo.guards, "dict_version", None)


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def value_of(source: Any) -> Any:
    """Return the value of ``source`` in the frame that is being compiled; LookupError if it cannot be told."""
    root = InstructionTranslator.current_tx().output.root_tx
    name = source.name if isinstance(source.name, str) else source.name()
    try:
        return eval(name, {"L": root.f_locals, "G": root.f_globals, "list": list, "dict": dict})
    except Exception as error:
        raise LookupError(name) from error


def replace(guards: Any, dropped: set[int], checks: Mapping[Any, Check]) -> None:
    """Take the guards with these ``id``s away, and guard each source of ``checks`` by its check."""
    kept = type(guards.inner)(guard for guard in guards.inner if id(guard) not in dropped)
    vars(guards).update(vars(type(guards)(kept)))
    for source, check in checks.items():
        guards.add(source.make_guard(functools.partial(CHECK_MATCH, check=check)))


def CHECK_MATCH(builder: Any, guard: Any, *, check: Check) -> None:
    """Guard: ``check`` holds for the object."""
    code = _guards.get_verbose_code_parts(f"{guard.name} is what it was", guard)
    builder.get_guard_manager(guard).add_lambda_guard(check, code, guard.user_stack)


def inputs_follow(gm: fx.GraphModule) -> bool:
    """Return whether Dynamo will load what placeholders ``gm`` has once the backend is done with it.

    ``OutputGraph.graphargs`` reads them off the graph, which was seen in 2.11 to 2.15.
    """
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # outside of a frame
        return False
    return output.graph is gm.graph and len(output.graphargs) == len(output.placeholders)


def source_of_input(placeholder: fx.Node) -> Any:
    """Return the source from which Dynamo loads an input of its graph; None if it does not say."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)


def ask_before_giving_up(stays: Callable[[int | None, str], bool]) -> list[Change]:
    """Compile a function again beyond a limit, instead of running it in Python, where ``stays`` says so.

    It gets Dynamo's number of the function and the limit's name. ``exceeds_recompile_limit`` was seen in 2.11 to 2.15.
    """
    from torch._dynamo import convert_frame

    name = "exceeds_recompile_limit"
    if not hasattr(convert_frame, name):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def exceeds(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
            exceeded, limit = stock(cache_size, compile_id)
            if exceeded and stays(getattr(compile_id, "frame_id", None), limit):
                return False, ""
            return exceeded, limit

        return exceeds

    return [WrapAttribute(convert_frame, name, changed)]


def on_what_is_left_to_python(
    tell: Callable[[types.CodeType], None], stays: Callable[[types.CodeType], bool]
) -> list[Change]:
    """Have ``tell`` hear of each frame that Dynamo could not compile, before Python runs it. It may raise.

    Not of frames without anything to compile. A function of which ``stays`` is true is neither compiled nor inlined, unless
    ``fullgraph`` allows no break. A collective that Python calls is not compiled by itself. ``ConvertFrame``, what it
    returns, its counters, ``trace_rules.check_verbose`` and ``SkipResult`` were seen in 2.11 to 2.15.
    """
    from torch._dynamo import convert_frame, trace_rules
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.types import ConvertFrameReturn
    from torch._dynamo.utils import counters

    converter = getattr(convert_frame, "ConvertFrame", None)
    if converter is None:
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call(self: Any, frame: Any, *args: Any, skip: int = 0, **named: Any) -> Any:
            if stays(frame.f_code) or is_deprecated_collective(frame):
                return ConvertFrameReturn()
            fine = counters["frames"]["ok"]
            result = stock(self, frame, *args, skip=skip + 1, **named)
            if counters["frames"]["ok"] == fine:  # an error that Dynamo took back
                tell(frame.f_code)
            return result

        return call

    def may_break() -> bool:
        translator: Any = InstructionTranslator.current_tx()
        return not any(getattr(translator, n, False) for n in ("one_graph", "error_on_graph_break"))

    def stays_out(function: Any) -> bool:
        try:
            code = function.get_code()
        except (AttributeError, NotImplementedError):  # not a function of Python's
            return False
        return stays(code) and may_break()

    def checked(stock: Any) -> Any:
        @functools.wraps(stock)
        def check(function: Any, is_inlined_call: bool = False, *rest: Any, **named: Any) -> Any:
            result = stock(function, is_inlined_call, *rest, **named)
            if is_inlined_call and not result.skipped and stays_out(function):
                return trace_rules.SkipResult(True, "this rank has left it to Python before")
            return result

        return check

    return [
        WrapAttribute(converter, "__call__", changed),
        WrapAttribute(trace_rules, "check_verbose", checked),
    ]


def is_deprecated_collective(frame: types.FrameType) -> bool:
    """Return whether a frame only warns before it calls a collective of ``torch.distributed``.

    Dynamo leaves those to Python where Python calls them, but not the wrapper that ``typing_extensions.deprecated`` puts around
    some, from 2.13 on: a graph of one launch, and known by lines that no graph of its caller has. ``arg`` is a name there.
    """
    if frame.f_code.co_name != "wrapper" or "arg" not in frame.f_code.co_freevars:
        return False
    wrapped = frame.f_locals.get("arg")
    return getattr(wrapped, "__module__", "") == "torch.distributed.distributed_c10d"


# --- Wrapping --------------------------------------------------------------------------------------


def wrap_with(unflatten: Callable[..., DTensor]) -> Change:
    """``unflatten`` becomes ``DTensor.__tensor_unflatten__``, and gets the one before as ``stock``."""
    return WrapAttribute(
        DTensor,
        "__tensor_unflatten__",
        lambda stock: staticmethod(functools.partial(unflatten, stock=stock)),
    )


stock_unflatten: Callable[..., DTensor] = DTensor.__tensor_unflatten__

# ``dtensor(local, spec, requires_grad=...)``, without an initializer that does nothing but take time.
_new: Any = getattr(torch.Tensor, "_dtensor__new__", None)
dtensor: Callable[..., DTensor] = DTensor if _new is None else functools.partial(_new, DTensor)


# --- Gradients -------------------------------------------------------------------------------------

Wrap = Callable[[tuple[Any, ...]], tuple[Any, ...]]

_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad", None)
_hook_owner: Any = getattr(torch.autograd.function, "_HookMixin", None)


# Inside it, attributes of a DTensor are read as fast as a tensor's: it has no ``__torch_function__`` to ask.
plain_attributes: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


class WrappedGradient(NamedTuple):
    """A gradient that is a DTensor: its place among the inputs, those of its parts among the outputs."""

    position: int
    local: int
    mesh: int
    meta: Any

    def unflatten(self, local: torch.Tensor, mesh: Any) -> DTensor:
        """The DTensor, as stock makes it."""
        inner = {"_local_tensor": local, "device_mesh": mesh}
        size, stride = torch.Size(self.meta.outer_size), tuple(self.meta.outer_stride)
        return DTensor.__tensor_unflatten__(inner, self.meta.meta, size, stride)


class GradientLayout(NamedTuple):
    """Targets of a backward graph's outputs: number of ``inputs``, those that get a tensor as it is, and DTensors."""

    inputs: int
    plain: tuple[tuple[int, int], ...]
    wrapped: tuple[WrappedGradient, ...]


def wrap_gradients(make: Callable[[Wrap, GradientLayout], Wrap]) -> list[Change]:
    """``make(stock, layout)`` stands for the function that turns a backward's outputs into gradients.

    Empty where this torch has no such function, or lacks what ``make`` needs to tell that nobody looks
    at a gradient. ``codegen_backward_subclass_fns`` was seen in 2.13 to 2.15.
    """
    try:
        from torch._functorch._aot_autograd import subclass_codegen as owner
    except ImportError:
        return []
    needed = (
        _AccumulateGrad,
        getattr(_hook_owner, "_register_hook", None),
        getattr(owner, "codegen_backward_subclass_fns", None),
        getattr(torch._C, "_current_autograd_node", None),
        getattr(torch._C, "_will_engine_execute_node", None),
    )
    if None in needed:
        return []

    def wrapped(stock: Any) -> Any:
        def build(grad_input_metas: Any = None) -> Any:
            unwrap, wrap = stock(grad_input_metas)
            layout = None if wrap is None else _layout(grad_input_metas)
            return unwrap, wrap if layout is None else make(wrap, layout)

        return build

    return [
        WrapAttribute(owner, "codegen_backward_subclass_fns", wrapped),
        SetAttribute(_hook_owner, "_register_hook", staticmethod(_register_or_tell)),
    ]


def _layout(metas: Sequence[Any]) -> GradientLayout | None:
    """None unless every gradient is a tensor or a DTensor of known size."""
    plain, wrapped, at = [], [], 0
    for position, meta in enumerate(metas):
        attrs = getattr(meta, "attrs", None)
        if attrs is None:
            plain.append((position, meta.unwrapped_idx))
            at = max(at, meta.unwrapped_idx + 1)
            continue
        sizes = (*meta.outer_size, *meta.outer_stride)
        if (
            meta.original_subclass_type is not DTensor
            or list(attrs) != ["_local_tensor", "device_mesh"]
            or any(hasattr(attr, "attrs") for attr in attrs.values())
            or not all(type(size) is int and size >= 0 for size in sizes)
        ):
            return None
        wrapped.append(WrappedGradient(position, at, at + 1, meta))
        at += 2
    return GradientLayout(len(metas), tuple(plain), tuple(wrapped)) if wrapped else None


def current_node() -> Any:
    """The autograd node that runs in this thread; None outside backward, or while disabled."""
    if _hook_owner._register_hook is not _register_or_tell:
        return None
    return torch._C._current_autograd_node()


def leaves_of(targets: Sequence[Any]) -> list[Any]:
    """The DTensor for which each autograd node accumulates; None if it is no such node or hooks are on it."""
    leaves: list[Any] = []
    for target in targets:
        leaf = target.variable if type(target) is _AccumulateGrad else None
        plain = (
            type(leaf) is DTensor
            and not leaf._backward_hooks
            and not leaf._post_accumulate_grad_hooks
        )
        leaves.append(leaf if plain else None)
    return leaves


_variable = operator.attrgetter("variable")
_tensor_hooks = operator.attrgetter("_backward_hooks")
_after_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
spec_of = operator.attrgetter("_spec")
local_of = operator.attrgetter("_local_tensor")


def all_leaves_of(targets: Sequence[Any]) -> list[Any] | None:
    """``leaves_of`` without a Python frame or line for each; None if it would give a None."""
    if set(map(type, targets)) != {_AccumulateGrad}:
        return None
    leaves = list(map(_variable, targets))
    if set(map(type, leaves)) != {DTensor}:
        return None
    hooked = any(map(_tensor_hooks, leaves)) or any(map(_after_hooks, leaves))
    return None if hooked else leaves


def all_will_run(nodes: Sequence[Any]) -> bool:
    """``will_run`` of every node."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


def will_run(node: Any) -> bool:
    """Return whether this backward runs the accumulator, and not ``torch.autograd.grad`` for its input."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


class _Told(Exception):
    pass


_ASK = object()
_stock_register_hook: Any = getattr(_hook_owner, "_register_hook", None)


def _register_or_tell(hooks: Any, hook: Any) -> Any:
    """Stock's way to add ``hook`` to those of a node, or to tell which there are."""
    if hook is _ASK:
        raise _Told(bool(hooks))
    return _stock_register_hook(hooks, hook)


def has_hooks(node: Any) -> bool:
    """Return whether hooks from Python are on an autograd node, which does not say; nothing is registered."""
    for register in (node.register_hook, node.register_prehook):
        try:
            register(_ASK)
        except _Told as told:
            if told.args[0]:
                return True
    return False


# --- Compiled code ---------------------------------------------------------------------------------

# In a block of it, operators skip the kernels of autograd.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


def wrap_compiled_code(
    wrap: Callable[[Callable[..., Any], str], Callable[..., Any]],
) -> list[Change]:
    """``wrap(call, source)`` stands for what runs a graph that Inductor has compiled or loaded from a cache.

    ``source`` is its Python code; code in C++ stays as it is. Empty where this torch cannot call below
    autograd. ``CompiledFxGraph.post_compile``, ``current_callable`` and ``source_code`` were seen in 2.11
    to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    if below_autograd is None or not hasattr(CompiledFxGraph, "post_compile"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
            stock(self, *args, **kwargs)
            source = getattr(self, "source_code", None)
            if isinstance(source, str) and self.current_callable and not config.cpp_wrapper:
                self.current_callable = wrap(self.current_callable, source)

        return post_compile

    return [WrapAttribute(CompiledFxGraph, "post_compile", changed)]
