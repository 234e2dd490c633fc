"""A kept frame in another process: compiled by the backend and guarded as behind a trace.

All private names were seen in 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.convert_frame as _convert_frame
import torch._dynamo.source as _sources
from torch import fx
from torch._dynamo import bytecode_transformation as _bytecode
from torch._dynamo import symbolic_convert as _symbolic
from torch._dynamo.exc import BackendCompilerFailed, ShortenTraceback, SkipFrame
from torch._guards import CompileContext, TracingContext, tracing
from torch.fx._lazy_graph_module import _make_graph_module as _graph_module
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dynamo_dist.torch_compat.changes import Change, WrapAttribute
from dynamo_dist.torch_compat.dynamo.frame_pickles import Named
from dynamo_dist.torch_compat.dynamo.frame_values import Values
from dynamo_dist.torch_compat.dynamo.kept_frames import (
    CAN_KEEP,
    STATIC,
    CannotKeep,
    KeptFrame,
    inputs_of,
)
from dynamo_dist.torch_compat.dynamo.reached import Reached
from dynamo_dist.torch_compat.probing import _optional

_Common = _optional("torch._dynamo.output_graph", "OutputGraphCommon")
_State = _optional("torch._dynamo.output_graph", "OutputGraphGuardsState")
_Argument = _optional("torch._dynamo.variables.builder", "GraphArg")
_Hook = _optional("torch._dynamo.utils", "CleanupHook")


class _Loaded(_Common or object):  # type: ignore[misc]
    """In the place of Dynamo's output of a trace, for those who ask for it while a kept frame is compiled and guarded."""

    def __init__(
        self,
        frame: KeptFrame,
        code: types.CodeType,
        scope: tuple[Mapping[str, Any], dict[str, Any]],
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


# Of the backend, as they leave a compile: not of the replay.
BACKEND_ERRORS = (ShortenTraceback, SkipFrame)


class Replay:
    """A kept frame in the process that has loaded it, for one call: put in place, compiled by the backend, guarded."""

    def __init__(
        self,
        frame: KeptFrame,
        code: types.CodeType,
        locals_: Mapping[str, Any],
        globals_: dict[str, Any],
    ) -> None:
        self.frame, self._code = frame, code
        self._output = _Loaded(frame, code, (locals_, globals_))
        self._values = Values(locals_, globals_)

    @property
    def values(self) -> Values:
        """What the frame sees."""
        return self._values

    def reach(self) -> None:
        """Put objects that no variable holds where the frame looks for them. Raises CannotKeep for one that is not there."""
        reached = self.frame.reached
        for name, each in reached.items():
            if not each.held:
                self._output.install(name, weakref.ref(self._found(each)))
        makes = any(each.held for each in reached.values())
        for name, each in reached.items():  # in the order of a trace, by which FSDP2 knows its root
            if makes and each.read is not None:
                each.read(self._output.global_scope[name](), self._values[each.source])
        for name, each in reached.items():
            if each.held:
                self._output.install(name, self._found(each))

    def _found(self, each: Reached) -> Any:
        try:
            return each.find(self._values[each.source])
        except (LookupError, AttributeError, TypeError) as error:
            raise CannotKeep(f"an object that is not there ({error})") from None

    def begin(self) -> None:
        """Do with these objects what a trace would have done. Raises CannotKeep."""
        for name, each in self.frame.reached.items():
            if each.begin is not None:
                each.begin(self._output.global_scope[name](), self._values[each.source])

    def drop(self) -> None:
        """Leave nothing in the frame's globals."""
        for hook in self._output.cleanups:
            hook()
        self._output.cleanups = []

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
        name = _bytecode.unique_id("__compiled_fn", with_uuid=True)
        output.install(
            name, torch._dynamo.disable(compiled, reason="do not trace Dynamo-compiled graph")
        )
        code = frame.bytecode
        named = {**frame.renamed, frame.compiled: name}
        names = tuple(named.get(each, each) for each in code.co_names)
        try:
            made = _made(code.replace(co_names=names), output)
            made.manager = _convert_frame.DynamoOutput.build_guards(made, self._code)
        except Exception as error:  # a guard that fails, or another torch than was seen
            raise CannotKeep(f"guards that fail, or cannot be built ({error})") from None
        return made

    def _graph(self) -> tuple[fx.GraphModule, list[Any]]:
        kept, graph = self.frame.graph, fx.Graph()
        nodes: dict[str, fx.Node] = {}
        inputs, examples = iter(kept["inputs"]), []

        def real(value: Any) -> Any:
            return nodes[value.name] if isinstance(value, Named) else value

        for op, name, target, args, kwargs, type_, meta in kept["nodes"]:
            args = fx.node.map_aggregate(args, real)
            kwargs = fx.node.map_aggregate(kwargs, real)
            node = graph.create_node(op, target, args, kwargs, name, type_)
            node.meta.update(meta)
            nodes[name] = node
            if op == "placeholder":
                examples.append(self._give(node, *next(inputs)))
        gm: Any = _graph_module(
            {}, graph
        )  # as Dynamo's, for cache keys have its fields, in their order
        gm.compile_subgraph_reason = None
        gm.meta.update(kept["meta"], dynamo_compile_id=CompileContext.current_compile_id())
        gm._param_name_to_source = kept["names"]
        gm._source_to_user_stacks = {}
        return gm, examples

    def _give(self, node: fx.Node, source: Any, is_tensor: bool, static: Any) -> Any:
        value = self._values[source]
        fake = None
        if is_tensor:
            trace: Any = self._output.tracing_context
            sizes = _as_they_are(value, source)
            trace.tensor_to_context[value] = sizes
            fake = trace.fake_mode.from_tensor(value, source=source, symbolic_context=sizes)
            node.meta["example_value"] = fake
            node.meta["tensor_dict"] = {} if static is None else {STATIC: static}
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
    except BACKEND_ERRORS:
        raise
    except Exception as error:
        failed = BackendCompilerFailed(backend, error, inspect.currentframe())
        raise failed.with_traceback(error.__traceback__) from None


def _made(code: types.CodeType, output: _Loaded) -> Any:
    class Made(_convert_frame.DynamoOutput):
        manager: Any = None

        def build_guards(self, code: Any, hooks: Any = None, *args: Any, **options: Any) -> Any:
            if hooks is None or not (hooks.guard_fail_fn or hooks.guard_filter_fn):
                return self.manager
            return super().build_guards(code, hooks, *args, **options)

    tracer: Any = types.SimpleNamespace(
        error_on_graph_break=False,
        is_tracing_resume_prologue=False,
        output_graph=output,
        output_graph_for_cleanup=output,
        closure=None,
        f_globals=output.global_scope,
        _cleanup_output_graph=lambda: None,
    )
    said: Any = {"tracer_output": tracer, "bytecode": code, "last_attempt_start_time": None}
    if "pycode" in Made.__dataclass_fields__:
        said["pycode"] = []
    return Made(**said)


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
            compiler_fn: Any,
            one_graph: bool,
            *rest: Any,
            **options: Any,
        ) -> Any:
            def trace() -> Any:
                return stock(
                    code,
                    globals,
                    locals,
                    builtins,
                    closure,
                    compiler_fn,
                    one_graph,
                    *rest,
                    **options,
                )

            if options.get("export") or options.get("package") is not None:
                return trace()
            return answer(trace, code, globals, locals, compiler_fn, one_graph)

        return compile_frame

    return [WrapAttribute(_convert_frame, "compile_frame", changed)]
