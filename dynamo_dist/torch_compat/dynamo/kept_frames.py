"""What Dynamo made of a frame, taken down so that another process can use it: code, graph, guards and the sources of inputs.

All private names were seen in 2.13.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.convert_frame as _convert_frame
import torch._dynamo.guards as _guards
from torch import fx
from torch._guards import Guard, Source, TracingContext

from dynamo_dist.torch_compat.dynamo import reached
from dynamo_dist.torch_compat.dynamo.guards import IDENTITY_MATCH, VALUE_MATCH
from dynamo_dist.torch_compat.probing import _optional

_Argument = _optional("torch._dynamo.variables.builder", "GraphArg")
# Whether this torch keeps a frame's parts where they are looked for here.
CAN_KEEP = (
    _Argument is not None
    and _optional("torch._dynamo.output_graph", "OutputGraphGuardsState") is not None
    and hasattr(_convert_frame, "compile_frame")
    and hasattr(_convert_frame, "DynamoOutput")
    and hasattr(_guards, "_get_closure_vars")
    and hasattr(Source, "get_value")
)
_OURS: dict[str, Any] = {each.__name__: each for each in (VALUE_MATCH, IDENTITY_MATCH)}
_META = ("stack_trace", "nn_module_stack", "source_fn_stack")
STATIC = "_dynamo_static_input_type"


class CannotKeep(Exception):
    """Something of a frame has no form that another process could use."""


@dataclass(frozen=True, slots=True)
class KeptGuard:
    """``kind``: the name of what builds it, with these further arguments, beside the ``source`` that it guards."""

    kind: str
    source: Any
    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]

    def guard(self) -> Guard:
        """The guard, to be built for what its source is in this process."""
        make: Any = _OURS.get(self.kind) or getattr(_guards.GuardBuilder, self.kind)
        if self.args or self.keywords:
            make = functools.partial(make, *self.args, **dict(self.keywords))
        return self.source.make_guard(make)


def kept_guard(guard: Guard) -> KeptGuard:
    """A guard without its frame. Raises CannotKeep for one that is no function of torch's builder."""
    make: Any = guard.create_fn
    args, keywords = (), {}
    if isinstance(make, functools.partial):
        make, args, keywords = make.func, make.args, dict(make.keywords)
    kind = getattr(make, "__name__", "")
    if (_OURS.get(kind) or getattr(_guards.GuardBuilder, kind, None)) is not make:
        raise CannotKeep(f"guard {kind} on {guard.name}")
    if kind == "TENSOR_MATCH":
        keywords.pop("value", None)  # the tensor at its source
    return KeptGuard(kind, guard.originating_source, args, tuple(sorted(keywords.items())))


@dataclass
class Compile:
    """A frame in work, as its backend sees it. ``guards``: before the backend edits them; ``left``: ids of those behind."""

    graph: dict[str, Any] | None = None
    guards: list[Guard] = field(default_factory=list)
    left: set[int] = field(default_factory=set)
    inputs: tuple[str, ...] = ()
    compiles: int = 0
    because: str = ""  # why the graph cannot be kept


def current_guards() -> list[Guard]:
    """Return the guards that the frame in work has so far."""
    context = TracingContext.try_get()
    return [] if context is None else list(context.guards_context.dynamo_guards)


def inputs_of(gm: fx.GraphModule) -> tuple[str, ...]:
    """Names of a graph's inputs."""
    return tuple(node.name for node in gm.graph.find_nodes(op="placeholder"))


def graph_of(gm: fx.GraphModule) -> dict[str, Any]:
    """A graph of Dynamo's as plain data and sources. Raises CannotKeep where it holds tensors or other graphs."""
    if (
        any(True for _ in gm.children())
        or any(True for _ in gm.parameters())
        or any(True for _ in gm.buffers())
    ):
        raise CannotKeep("a graph that holds modules or tensors")
    nodes, inputs = [], []
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            raise CannotKeep("a graph that holds constants")
        if node.op == "placeholder":
            inputs.append(_input(node))
        meta = {key: _named_classes(node.meta[key]) for key in _META if key in node.meta}
        if node.meta.get("is_wrapped"):
            raise CannotKeep("a function that was wrapped for the graph")
        if (
            "example_value" in node.meta
        ):  # torch's cache asks of which nodes there is one, and not for what it is
            meta["example_value"] = None
        nodes.append((node.op, node.name, node.target, node.args, node.kwargs, node.type, meta))
    meta = {
        key: value for key, value in gm.meta.items() if key == "dynamo_flat_name_to_original_fqn"
    }
    return {
        "nodes": nodes,
        "inputs": inputs,
        "meta": meta,
        "names": dict(getattr(gm, "_param_name_to_source", {}) or {}),
    }


def _input(node: fx.Node) -> tuple[Any, bool, Any]:
    argument: Any = node.meta.get("grapharg")
    if type(argument) is not _Argument or argument.pass_arg_as_tensor or argument.source is None:
        raise CannotKeep(f"the input {node.name}, which is made for each call")
    if argument.is_tensor and not isinstance(argument.example, torch.Tensor):
        raise CannotKeep(f"the input {node.name}, a number")
    if isinstance(argument.example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CannotKeep(f"the input {node.name}, a size that may change")
    kept = (node.meta.get("tensor_dict") or {}).get(STATIC)
    return argument.source, argument.is_tensor, kept


def _named_classes(value: Any) -> Any:
    """Metadata of a node, a class in it as its name."""
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, dict):
        return {key: _named_classes(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_named_classes, value))
    return value if isinstance(value, (str, int)) else getattr(value, "__name__", str(value))


@dataclass
class KeptFrame:
    """All of a frame that is kept. ``guards``: before the backend, ``later``: those that came behind it.

    ``addressed``: globals that bear the address of an object; ``reached``: how to come to those of them that it may need.
    ``renamed``: names of globals, as they are called in the process that loads it.
    """

    bytecode: types.CodeType
    imports: dict[str, str]
    compiled: str
    builtins: str
    graph: dict[str, Any]
    inputs: tuple[str, ...]
    guards: list[KeptGuard]
    later: list[KeptGuard]
    key_order: list[Any]
    sizes: dict[Any, Any]
    effects: tuple[str, ...]
    rank_dependent: bool
    addressed: frozenset[str]
    reached: dict[str, reached.Reached]
    renamed: dict[str, str] = field(default_factory=dict)


def frame_of(made: Any, compile_: Compile) -> KeptFrame:
    """What Dynamo made of a frame. Raises CannotKeep, saying what stands in the way."""
    output, code = made.tracer_output.output_graph, made.bytecode
    if compile_.graph is None or compile_.compiles != 1:
        raise CannotKeep("a frame without one graph")
    if (
        getattr(output.compile_subgraph_reason, "graph_break", False)
        or "torch_dynamo_resume_in" in code.co_name
    ):
        raise CannotKeep("a graph break")
    _check_state(output)
    [compiled] = [name for name in code.co_names if name.startswith("__compiled_fn_")] or [""]
    builtins = output.name_of_builtins_dict_key_in_fglobals or ""
    others = set(output.installed_globals) - {compiled, builtins} - set(output.import_sources)
    known = reached.noted(output)
    if not compiled or (needed := others.intersection(code.co_names) - set(known)):
        raise CannotKeep(f"code that needs {', '.join(sorted(needed)) if compiled else 'no graph'}")
    # Not in 2.11, where nothing asks for them.
    effects = tuple(getattr(output, "get_replayed_side_effect_source_refs", tuple)())
    if any(name in text for name in others for text in effects):
        raise CannotKeep("a change of what no variable holds")
    # That of sizes: none are symbols here.
    every = [guard for guard in output.guards if guard.create_fn_name() != "SHAPE_ENV"]
    before = [guard for guard in compile_.guards if guard.create_fn_name() != "SHAPE_ENV"]
    later = [guard for guard in every if id(guard) not in compile_.left]
    return KeptFrame(
        code,
        dict(output.import_sources),
        compiled,
        builtins,
        compile_.graph,
        compile_.inputs,
        list(map(kept_guard, before)),
        list(map(kept_guard, later)),
        list(output.guard_on_key_order),
        dict(output.input_source_to_sizes_strides),
        effects,
        getattr(output.tracing_context, "dist_rank_dependent", False),
        frozenset(others),
        known,
    )


def _check_state(output: Any) -> None:
    env = output.shape_env
    symbols = getattr(
        env, "backed_var_to_val" if hasattr(env, "backed_var_to_val") else "var_to_val"
    )
    if symbols or env.guards or env.deferred_runtime_asserts:
        raise CannotKeep("a size that may change")
    for what, there in (
        ("random numbers of Python", getattr(output, "random_calls", ())),
        (
            "subclasses with __torch_function__",
            getattr(output, "torch_function_subclass_inlined", False),
        ),
        ("state for the backward pass", output.backward_state),
        ("streams or events", _has_user_objects()),
    ):
        if there:
            raise CannotKeep(what)


def _has_user_objects() -> bool:
    there = _optional("torch._dynamo.graph_bytecode_inputs", "has_user_objects")
    return bool(there is not None and there())


def traced_files(made: Any) -> list[str]:
    """Files of all code that was traced for a frame."""
    return sorted(
        {code.co_filename for code in made.tracer_output.output_graph.tracing_context.traced_code}
    )
