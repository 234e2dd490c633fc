"""Functions and objects that Dynamo traces as ours, and the ends of graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_call_method,
    create_instruction,
)
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.exc import UnspecializeRestartAnalysis
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.distributed import BackwardHookVariable
from torch._dynamo.variables.tensor import TensorVariable

from dynamo_dist.torch_compat.dynamo_building import realized
from dynamo_dist.torch_compat.patching import (
    Change,
    ConfigDefault,
    SetAttribute,
    WrapAttribute,
    _optional,
)

CALL = _optional("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder")


class ObjectTracker(BackwardHookVariable):
    """An object that exists while tracing only; its members and its way out are the subclass's hooks.

    It is true: stock's hooks are a class that no table holds and every condition takes.
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

    def is_python_equal(self, other: object) -> bool:
        return self is other


def construct_on_return(codegen: Any, cls: type, args: list[Any]) -> None:
    """Make ``cls(*args)`` when the compiled function returns; a function in ``args`` is imported."""
    codegen.add_push_null(lambda: codegen.load_import_from(cls.__module__, cls.__name__))
    for arg in args:
        if inspect.isfunction(arg):
            codegen.load_import_from(arg.__module__, arg.__name__)
        else:
            codegen(arg)
    codegen.extend_output(create_call_function(len(args), False))


def call_before_graph(tx: Any, source: Any, call: str | Callable[[Any], None]) -> None:
    """Call ``source.call()``, or an importable ``call(source)``, when the compiled function starts.

    Each time, before its graph and after its guards.
    """
    codegen = PyCodegen(tx.output.root_tx)
    if isinstance(call, str):
        codegen(source)
        codegen.load_method(call)
        codegen.extend_output(create_call_method(0))
    else:
        module, name = call.__module__, call.__name__
        codegen.add_push_null(lambda: codegen.load_import_from(__name__, "run_eagerly"))
        codegen.load_import_from(module, name)
        codegen(source)
        codegen.extend_output(create_call_function(2, False))
    codegen.append_output(create_instruction("POP_TOP"))
    tx.output.pregraph_bytecode.extend(codegen.get_instructions())


@torch.compiler.disable  # type: ignore[untyped-decorator]
def run_eagerly(call: Callable[[Any], None], value: Any) -> None:
    """Call a function with Dynamo off, for it and for what it calls."""
    call(value)


def trace_state(tx: Any, make: Callable[[], Any], name: str = "_dynamo_dist") -> Any:
    """Return the state of that name that we keep for one trace; made anew when Dynamo starts over."""
    state = vars(tx.output).get(name)
    if state is None:
        state = make()
        setattr(tx.output, name, state)
    return state


def current_tracer(tx: Any) -> Any:
    """The graph that is traced right now: the function's, or one inside of it."""
    return tx.output.current_tracer


def is_subclass_instance(tracker: Any) -> bool:
    """Return whether it tracks a tensor of a class that may answer c10d calls itself, such as DTensor."""
    tracker = realized(tracker)
    if not isinstance(tracker, TensorVariable):
        return False
    return tracker.python_type() not in (torch.Tensor, torch.nn.Parameter)


def traced_user_line(tx: Any, ours: str) -> str:
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


def on_end(starts_over: Callable[[Any, bool], bool]) -> list[Change]:
    """Call ``starts_over(tx, breaks)`` as a graph ends, at a return or a break; if it says so, trace anew."""

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def compile_subgraph(self: Any, tx: Any, reason: Any, *args: Any, **kwargs: Any) -> Any:
            if starts_over(tx, reason.graph_break):
                raise UnspecializeRestartAnalysis(restart_reason="dynamo_dist")
            return stock(self, tx, reason, *args, **kwargs)

        return compile_subgraph

    return [WrapAttribute(OutputGraph, "compile_subgraph", changed)]


def forget_in_dictionaries(tx: Any, values: set[int]) -> None:
    """Leave no tracker of these ids in a dictionary that outlives the graph: what was there before stays."""
    for tracker in list(tx.output.side_effects.id_to_variable.values()):
        if not isinstance(tracker, ConstDictVariable) or tracker.source is None:
            continue
        for key, value in list(tracker.items.items()):
            if id(realized(value)) in values:
                del tracker.items[key]
                if key in tracker.original_items:
                    tracker.items[key] = tracker.original_items[key]


def allow_point_to_point() -> list[Change]:
    """Let stock construct ``P2POp`` while tracing."""
    return [ConfigDefault(_dynamo_config, "enable_p2p_compilation", True)]
