"""What Dynamo made of a frame, taken down so that another process can use it: code, graph, guards and the sources of inputs.

All private names were seen in 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import json
import marshal
import pickle
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.convert_frame as _convert_frame
import torch._dynamo.guards as _guards
import torch._dynamo.source as _sources
from torch import fx
from torch._dynamo import bytecode_transformation as _bytecode
from torch._dynamo import symbolic_convert as _symbolic
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, SkipFrame
from torch._guards import CompileContext, Guard, Source, TracingContext, tracing
from torch.fx._lazy_graph_module import _make_graph_module as _graph_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynamo_dist.torch_compat.changes import Change, WrapAttribute
from dynamo_dist.torch_compat.probing import _optional

_Common = _optional("torch._dynamo.output_graph", "OutputGraphCommon")
_State = _optional("torch._dynamo.output_graph", "OutputGraphGuardsState")
_Argument = _optional("torch._dynamo.variables.builder", "GraphArg")
_Hook = _optional("torch._dynamo.utils", "CleanupHook")
# Whether this torch keeps a frame's parts where they are looked for here.
CAN_KEEP = (
    None not in (_Common, _State, _Argument, _Hook)
    and hasattr(_convert_frame, "compile_frame")
    and hasattr(_convert_frame, "DynamoOutput")
    and hasattr(_guards, "_get_closure_vars")
    and hasattr(Source, "get_value")
)
_META = ("stack_trace", "nn_module_stack", "source_fn_stack")
_BUILTINS = "__builtins_dict__of_kept_frames"
_STATIC = "_dynamo_static_input_type"


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
        make: Any = getattr(_guards.GuardBuilder, self.kind)
        if self.args or self.keywords:
            make = functools.partial(make, *self.args, **dict(self.keywords))
        return self.source.make_guard(make)


def kept_guard(guard: Guard) -> KeptGuard:
    """A guard without its frame. Raises CannotKeep for one that is no function of torch's builder."""
    make, args, keywords = guard.create_fn, (), {}
    if isinstance(make, functools.partial):
        make, args, keywords = make.func, make.args, dict(make.keywords)
    kind = getattr(make, "__name__", "")
    if getattr(_guards.GuardBuilder, kind, None) is not make:
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
    argument = node.meta.get("grapharg")
    if type(argument) is not _Argument or argument.pass_arg_as_tensor or argument.source is None:
        raise CannotKeep(f"the input {node.name}, which is made for each call")
    if argument.is_tensor and not isinstance(argument.example, torch.Tensor):
        raise CannotKeep(f"the input {node.name}, a number")
    if isinstance(argument.example, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CannotKeep(f"the input {node.name}, a size that may change")
    kept = (node.meta.get("tensor_dict") or {}).get(_STATIC)
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
class Frame:
    """All of a frame that is kept. ``guards``: before the backend, ``later``: those that came behind it."""

    bytecode: bytes
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
    kept_builtins: str = ""  # its name there, in the process that loads it


def frame_of(made: Any, compile_: Compile) -> Frame:
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
    if not compiled or others:
        raise CannotKeep(f"code that needs {', '.join(sorted(others)) or 'no graph'}")
    try:
        marshalled = marshal.dumps(code)
    except ValueError:
        raise CannotKeep("code that holds an object") from None
    # That of sizes: none are symbols here.
    every = [guard for guard in output.guards if guard.create_fn_name() != "SHAPE_ENV"]
    before = [guard for guard in compile_.guards if guard.create_fn_name() != "SHAPE_ENV"]
    later = [guard for guard in every if id(guard) not in compile_.left]
    return Frame(
        marshalled,
        dict(output.import_sources),
        compiled,
        builtins,
        compile_.graph,
        compile_.inputs,
        list(map(kept_guard, before)),
        list(map(kept_guard, later)),
        list(output.guard_on_key_order),
        dict(output.input_source_to_sizes_strides),
        tuple(output.get_replayed_side_effect_source_refs()),
        getattr(output.tracing_context, "dist_rank_dependent", False),
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


def modes() -> str:
    """A mode of torch that is on and in which no frame is kept or loaded, or ""."""
    on = {
        "a function mode": torch._C._len_torch_function_stack(),
        "a transform of functorch": torch._C._functorch.peek_interpreter_stack() is not None,
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "forward derivatives": torch.autograd.forward_ad._current_level != -1,
    }
    return next((name for name, is_on in on.items() if is_on), "")


class Values:
    """Values of sources in a frame."""

    def __init__(self, locals_: Mapping[str, Any], globals_: Mapping[str, Any]) -> None:
        import builtins

        self._scope = {"L": locals_, "G": globals_, "__builtins__": vars(builtins).copy()}
        self._names = _guards._get_closure_vars()
        self._cache: dict[Any, Any] = {}

    def __getitem__(self, source: Any) -> Any:
        """Value of a source. Raises LookupError if there is none."""
        try:
            return source.get_value(self._scope, self._names, self._cache)
        except Exception as error:
            raise LookupError(source.name) from error


def settings() -> tuple[tuple[str, str], ...]:
    """Dynamo's configuration as this compile has it, as far as it changes what is compiled, and torch's state; by name."""
    config, ignored = (
        _dynamo_config.get_config_copy(),
        getattr(_dynamo_config, "_compile_ignored_keys", ()),
    )
    found = {
        f"torch._dynamo.config.{name}": _plain(value)
        for name, value in config.items()
        if name not in ignored
    }
    guarded = json.loads(torch._C._dynamo.guards.GlobalStateGuard().__getstate__())
    found |= {f"torch's state {name}": str(value) for name, value in guarded.items()}
    found["the default device"] = str(torch.utils._device.CURRENT_DEVICE)
    return tuple(sorted(found.items()))


def _plain(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    return getattr(value, "__qualname__", None) or repr(value)


def dumps(frame: Frame, refuse: Callable[[Any], None]) -> bytes:
    """``frame`` as bytes. ``refuse(object)`` raises for what is not to be pickled. Raises CannotKeep for what cannot be."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, frame.builtins, refuse).dump(frame)
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
        NotImplementedError,
        RecursionError,
    ) as error:
        raise CannotKeep(f"what cannot be pickled ({error})") from None
    return buffer.getvalue()


def loads(content: bytes, globals_: dict[str, Any]) -> Frame:
    """Inverse of ``dumps``, in a process whose frame has these globals: what sources name is put there.

    Raises CannotKeep if it cannot be read, or if a name is taken.
    """
    frame, builtins = _read(content, _BUILTINS)
    if frame.builtins:
        frame.kept_builtins, frame.builtins = frame.builtins, builtins
        globals_.setdefault(builtins, builtins_of(globals_))
    for name, module in frame.imports.items():
        there = importlib.import_module(module)
        if globals_.setdefault(name, there) is not there:
            raise CannotKeep(f"another {name}")
    return frame


def _read(content: bytes, builtins: str) -> tuple[Frame, str]:
    try:
        frame = _Unpickler(io.BytesIO(content), builtins).load()
    except Exception as error:  # of whatever it names
        raise CannotKeep(f"what cannot be read ({error})") from None
    return frame, builtins


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, builtins: str, refuse: Callable[[Any], None]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._builtins, self._refuse = builtins, refuse

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return "node", obj.name
        if type(obj) is _sources.GlobalSource and obj.global_name == self._builtins:
            return "builtins", ""
        return None

    def reducer_override(self, obj: Any) -> Any:
        self._refuse(obj)
        if isinstance(obj, torch._ops.OpOverload):
            return _operator, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        return NotImplemented


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any, builtins: str) -> None:
        super().__init__(file)
        self._builtins = builtins

    def persistent_load(self, key: Any) -> Any:
        what, name = key
        return _Named(name) if what == "node" else _sources.GlobalSource(self._builtins)


def _operator(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


class _Loaded(_Common or object):  # type: ignore[misc]
    """In the place of Dynamo's output of a trace, for those who ask for it while a kept frame is compiled and guarded."""

    def __init__(
        self, frame: Frame, code: types.CodeType, scope: tuple[Mapping[str, Any], dict[str, Any]]
    ) -> None:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        self.frame = frame
        local, global_ = scope
        shape_env = ShapeEnv(assume_static_by_default=True, tracked_fakes=[])
        self.tracing_context = TracingContext(torch._subclasses.FakeTensorMode(shape_env=shape_env))
        self.tracing_context.traced_code.append(code)
        if frame.rank_dependent:
            self.tracing_context.dist_rank_dependent = True  # type: ignore[attr-defined]
        guards = self.tracing_context.guards_context
        super().__init__(
            _State(
                local_scope=local,
                global_scope=global_,
                torch_function_mode_stack=[],
                guard_on_key_order=set(frame.key_order),
                input_source_to_sizes_strides=frame.sizes,
                dual_level=torch.autograd.forward_ad._current_level,
                functorch_layers=[],
                current_device=torch.utils._device.CURRENT_DEVICE,
                global_state_guard=torch._C._dynamo.guards.GlobalStateGuard(),
                name_of_builtins_dict_key_in_fglobals=frame.builtins or None,
                _guards=guards.dynamo_guards,
                _aotautograd_guards=guards.aotautograd_guards,
            ),
            import_sources=frame.imports,
            shape_env=shape_env,
        )
        self.cleanups: list[Any] = []
        self.tracers: list[Any] = []
        self.non_compliant_ops: set[Any] = set()
        self.compliant_custom_ops: set[Any] = set()
        self.compile_subgraph_reason = None
        self.root_tx = types.SimpleNamespace(
            f_code=code, f_locals=local, f_globals=global_, output=self
        )
        self.graph: Any = None

    @property
    def guards(self) -> Any:
        return self.tracing_context.guards_context.dynamo_guards

    @property
    def placeholders(self) -> list[fx.Node]:
        return list(self.graph.find_nodes(op="placeholder"))

    @property
    def graphargs(self) -> list[Any]:
        return [node.meta["grapharg"] for node in self.placeholders]

    def install(self, name: str, value: object) -> None:
        self.cleanups.append(_Hook.create(self.global_scope, name, value))

    def get_replayed_side_effect_source_refs(self, **_: Any) -> list[str]:
        return list(self.frame.effects)

    def is_empty_graph(self) -> bool:
        return False

    def count_calls(self) -> int:
        return sum(node.op.startswith("call") for node in self.graph.nodes)

    def get_graph_sizes_structured(self) -> dict[str, Any]:
        return {}

    def has_outputs(self) -> bool:
        return True

    def bypass_package(self, *_: Any, **__: Any) -> None:
        """Nothing: frames that are packaged are not replayed."""


def unique(name: str) -> str:
    """A name that no global of any frame has."""
    return _bytecode.unique_id(name, with_uuid=True)


def builtins_of(globals_: dict[str, Any]) -> dict[str, Any]:
    """The dictionary of builtins that a frame's globals have."""
    found: Any = globals_["__builtins__"]
    return found if isinstance(found, dict) else vars(found)


class Replay:
    """A kept frame in the process that has loaded it, for one call: put in place, compiled by the backend, guarded."""

    def __init__(
        self,
        frame: Frame,
        code: types.CodeType,
        locals_: Mapping[str, Any],
        globals_: dict[str, Any],
    ) -> None:
        self.frame, self._code = frame, code
        self._output = _Loaded(frame, code, (locals_, globals_))
        self._values = Values(locals_, globals_)

    def compile(self, backend: Callable[..., Any]) -> Any:
        """Have the backend compile the graph, and build the guards: what Dynamo would return for the frame.

        Raises CannotKeep if the graph's inputs or the guards are no longer those of the kept code.
        """
        frame, output = self.frame, self._output
        gm, examples = self._graph()
        output.graph = gm.graph
        with tracing(output.tracing_context), _as_translator(output.root_tx):
            for each in frame.guards:
                output.guards.add(each.guard())
            compiled = _compiled(backend, gm, examples)
            if not callable(compiled):
                raise CannotKeep("a backend that makes no function")
            if inputs_of(gm) != frame.inputs:
                raise CannotKeep("other inputs than the code gives")
            for each in frame.later:
                output.guards.add(each.guard())
        name = unique("__compiled_fn")
        output.install(
            name, torch._dynamo.disable(compiled, reason="do not trace Dynamo-compiled graph")
        )
        code = marshal.loads(frame.bytecode)
        named = {frame.compiled: name, frame.kept_builtins: frame.builtins}
        names = tuple(named.get(each, each) for each in code.co_names)
        made = _made(code.replace(co_names=names), output)
        try:
            made.manager = _convert_frame.DynamoOutput.build_guards(made, self._code)
        except AssertionError as error:
            for hook in output.cleanups:
                hook()
            raise CannotKeep(f"guards that fail ({error})") from None
        return made

    def _graph(self) -> tuple[fx.GraphModule, list[Any]]:
        kept, graph = self.frame.graph, fx.Graph()
        nodes: dict[str, fx.Node] = {}
        inputs, examples = iter(kept["inputs"]), []

        def real(value: Any) -> Any:
            return nodes[value.name] if isinstance(value, _Named) else value

        for op, name, target, args, kwargs, type_, meta in kept["nodes"]:
            args = fx.node.map_aggregate(args, real)
            kwargs = fx.node.map_aggregate(kwargs, real)
            node = graph.create_node(op, target, args, kwargs, name, type_)
            node.meta.update(meta)
            nodes[name] = node
            if op == "placeholder":
                examples.append(self._give(node, *next(inputs)))
        gm = _graph_module({}, graph)  # as Dynamo's, for cache keys have its fields, in their order
        gm.compile_subgraph_reason = None
        gm.meta.update(kept["meta"], dynamo_compile_id=CompileContext.current_compile_id())
        gm._param_name_to_source = kept["names"]
        gm._source_to_user_stacks = {}
        return gm, examples

    def _give(self, node: fx.Node, source: Any, is_tensor: bool, static: Any) -> Any:
        value = self._values[source]
        fake = None
        if is_tensor:
            trace, sizes = self._output.tracing_context, _as_they_are(value, source)
            trace.tensor_to_context[value] = sizes
            fake = trace.fake_mode.from_tensor(value, source=source, symbolic_context=sizes)
            node.meta["example_value"] = fake
            node.meta["tensor_dict"] = {} if static is None else {_STATIC: static}
        node.meta["grapharg"] = _Argument(source, value, False, fake, is_tensor)
        node._dynamo_source = source
        return node.meta["grapharg"].example


def _as_they_are(tensor: torch.Tensor, source: Any) -> Any:
    """Sizes of a tensor and of those in it: numbers, none a symbol; in the form in which Dynamo says so."""
    from torch.fx.experimental import symbolic_shapes as shapes

    dims, base = tensor.dim(), tensor._base if tensor._is_view() else None
    sizes: dict[str, Any] = {
        "dynamic_sizes": [shapes.DimDynamic.STATIC] * dims,
        "dynamic_strides": [shapes.DimDynamic.INFER_STRIDE] * dims,
        "constraint_sizes": [None] * dims,
        "constraint_strides": [None] * dims,
        "view_base_context": None
        if base is None
        else _as_they_are(base, _sources.AttrSource(source, "_base")),
        "tensor_source": source,
        "shape_env_to_source_to_symbol_cache": {},
    }
    if not is_traceable_wrapper_subclass(tensor):
        return shapes.StatefulSymbolicContext(**sizes)
    names, _ = type(tensor).__tensor_flatten__(tensor)
    inner = {name: getattr(tensor, name) for name in names}
    contexts = {
        name: _as_they_are(value, _sources.AttrSource(source, name))
        for name, value in inner.items()
        if isinstance(value, torch.Tensor)
    }
    return shapes.SubclassSymbolicContext(**sizes, inner_contexts=contexts)


def _compiled(backend: Callable[..., Any], gm: fx.GraphModule, examples: list[Any]) -> Any:
    """What the backend makes of the graph; its errors leave as they do behind a trace."""
    try:
        return backend(gm, examples)
    except (ShortenTraceback, SkipFrame):
        raise
    except Exception as error:
        failed = BackendCompilerFailed(backend, error, inspect.currentframe())
        raise failed.with_traceback(error.__traceback__) from None


def _made(code: types.CodeType, output: _Loaded) -> Any:
    class Made(_convert_frame.DynamoOutput):  # type: ignore[misc]
        manager: Any = None

        def build_guards(self, code: Any, hooks: Any = None, *args: Any, **options: Any) -> Any:
            if hooks is None or not (hooks.guard_fail_fn or hooks.guard_filter_fn):
                return self.manager
            return super().build_guards(code, hooks, *args, **options)

    tracer = types.SimpleNamespace(
        error_on_graph_break=False,
        is_tracing_resume_prologue=False,
        output_graph=output,
        output_graph_for_cleanup=output,
        closure=None,
        f_globals=output.global_scope,
        _cleanup_output_graph=lambda: None,
    )
    return Made(tracer_output=tracer, bytecode=code, pycode=[], last_attempt_start_time=None)


@contextlib.contextmanager
def _as_translator(root: Any) -> Iterator[None]:
    """Whoever asks in the block which frame is being traced gets this one."""
    tls = _symbolic.tls
    before = getattr(tls, "current_tx", None)
    tls.current_tx = root
    try:
        yield
    finally:
        if before is None:
            del tls.current_tx
        else:
            tls.current_tx = before


def asked_first(answer: Callable[..., Any]) -> list[Change]:
    """``answer(stock, code, globals, locals, backend, one_graph)`` makes what Dynamo does of a frame, where torch keeps frames.

    Exports and packages are left to stock.
    """
    if not CAN_KEEP:
        return []

    def changed(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def compile_frame(
            code: Any,
            globals: Any,
            locals: Any,
            builtins: Any,
            closure: Any,
            backend: Any,
            one_graph: bool,
            *rest: Any,
            **options: Any,
        ) -> Any:
            def trace() -> Any:
                return stock(
                    code, globals, locals, builtins, closure, backend, one_graph, *rest, **options
                )

            if options.get("export") or options.get("package") is not None:
                return trace()
            return answer(trace, code, globals, locals, backend, one_graph)

        return compile_frame

    return [WrapAttribute(_convert_frame, "compile_frame", changed)]


def traced_files(made: Any) -> list[str]:
    """Files of all code that was traced for a frame."""
    return sorted(
        {code.co_filename for code in made.tracer_output.output_graph.tracing_context.traced_code}
    )
