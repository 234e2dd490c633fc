"""The only file that names private torch parts for this package, each behind a feature probe.

Every function says in which torch versions its private names were seen.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import fx
from torch.utils._ordered_set import OrderedSet

# Called with a symbolic size's expression, its hint and where its symbols are from, in place of the hint.
SizeReader = Callable[[Any, int, Mapping[Any, str]], Any]
_size_reader: ContextVar[SizeReader | None] = ContextVar("size_reader", default=None)


def size_hint(size: int | torch.SymInt) -> int:
    """An int as it is; of a symbolic size the value seen while tracing (1 if there is none).

    Seen in torch 2.11 to 2.15.
    """
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    value = int(hint) if hint is not None else 1
    read = _size_reader.get()
    if read is None:
        return value
    expr = size.node.expr
    return cast(int, read(expr, value, {s: _source_of_symbol(size, s) for s in expr.free_symbols}))


def _source_of_symbol(size: torch.SymInt, symbol: Any) -> str:
    """``L['x'].size()[0]``, or "" where torch does not say. Seen in torch 2.11 to 2.15."""
    known = getattr(getattr(size.node, "shape_env", None), "var_to_sources", {})
    for source in known.get(symbol, ()):
        name = source.name
        return str(name() if callable(name) else name)
    return ""


@contextlib.contextmanager
def sizes_read_by(read: SizeReader) -> Iterator[None]:
    """Within it, ``size_hint`` of a symbolic size is what ``read`` makes of it: a number of its own kind."""
    token = _size_reader.set(read)
    try:
        yield
    finally:
        _size_reader.reset(token)


def group_size_of(group_name: str) -> int:
    """Ranks in a registered process group; 0 if there is none of that name. Seen in 2.11 to 2.15."""
    from torch.distributed import distributed_c10d

    try:
        size: Any = distributed_c10d._get_group_size_by_name
        return int(size(group_name))
    except (RuntimeError, ValueError, KeyError, LookupError):
        return 0


def group_device_types(group_name: str) -> frozenset[str] | None:
    """Device types that a registered group's backends serve; None if there is no such group.

    Empty where the group does not say. Seen in 2.11 to 2.15.
    """
    from torch.distributed import distributed_c10d

    try:
        resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported
        group = resolve(group_name)
    except (RuntimeError, ValueError, KeyError, LookupError):
        return None
    try:
        return frozenset(device.type for device in group._device_types)
    except (AttributeError, RuntimeError):
        return frozenset()


# --- Inductor's configuration -------------------------------------------------------------------


def inductor_config() -> Any:
    """``torch._inductor.config``, imported on first use. Seen in 2.11 to 2.15."""
    from torch._inductor import config

    return config


def has_config(key: str) -> bool:
    """Return whether this torch's Inductor knows the dotted configuration key."""
    return key in inductor_config().get_config_copy()


def get_config(key: str) -> Any:
    """The current value of a dotted key, under whatever patch is active."""
    value: Any = inductor_config()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def config_keys() -> frozenset[str]:
    """Every dotted key of this torch's Inductor configuration."""
    return frozenset(inductor_config().get_config_copy())


def is_config_set(key: str) -> bool:
    """Return whether the dotted key has another value in this process than torch gives it.

    Torch's own record of who set what is no help: a patch leaves behind that everything in it was set.
    ``_config`` was seen in 2.11 to 2.15.
    """
    return bool(get_config(key) != inductor_config()._config[key].default)


def is_inductor_key(key: str) -> bool:
    """Return whether torch.compile would take ``key`` in ``options``; dashes count as underscores."""
    return key.replace("-", "_") in config_keys()


# --- Attaching passes ---------------------------------------------------------------------------


@functools.cache
def pass_base() -> type:
    """The class to derive an Inductor graph pass from, told whether the graph is for inference.

    ``CustomInferenceAwareGraphPass`` was seen in 2.13 and 2.15; 2.11 has ``CustomGraphPass`` only.
    """
    from torch._inductor import custom_graph_pass

    return getattr(
        custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass
    )


def call_pass(pass_: Callable[..., Any], graph: fx.Graph, is_inference: bool) -> None:
    """Call a user's Inductor pass the way this torch would."""
    from torch._inductor import custom_graph_pass

    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
    if aware is not None and isinstance(pass_, aware):
        pass_(graph, is_inference)
    else:
        pass_(graph)


def reorder_for_locality(graph: fx.Graph) -> None:
    """Stock's pass of that name. Seen in 2.11 to 2.15."""
    from torch._inductor.fx_passes.post_grad import reorder_for_locality as stock

    stock(graph)


@functools.cache
def can_pin_order() -> bool:
    """Return whether stock's ``control_dependencies`` is there to pin an order. Seen in 2.11 to 2.15."""
    try:
        from torch._inductor.fx_passes import control_dependencies
    except ImportError:
        return False
    return hasattr(control_dependencies, "preserve_node_ordering")


def pin_nodes(graph: fx.Graph, after: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
    """Make each key run after its values in the generated code. Call only if ``can_pin_order()``.

    Each key is replaced by a higher-order op of the same name that holds the original operation.
    """
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering

    preserve_node_ordering(graph, {node: OrderedSet(deps) for node, deps in after.items()})


def pinned_target(node: fx.Node) -> Any:
    """The operation a pinned node holds; the node's own target if it is not pinned."""
    if not can_pin_order() or node.op != "call_function":
        return node.target
    from torch._inductor.fx_passes.control_dependencies import control_deps

    if node.target is not control_deps:
        return node.target
    holder = node.args[1]
    assert isinstance(holder, fx.Node)
    owner = node.graph.owning_module
    assert owner is not None
    subgraph = getattr(owner, str(holder.target))
    return next(n.target for n in subgraph.graph.nodes if n.op == "call_function")


# --- Where a compile stands ---------------------------------------------------------------------


def graph_being_compiled() -> str:
    """AOTAutograd's name of the graph in work, such as ``model__0_backward_1``, or "".

    Seen in 2.11 to 2.15.
    """
    from torch._functorch import aot_autograd

    name = getattr(aot_autograd, "get_graph_being_compiled", None)
    try:
        return str(name()) if name is not None else ""
    except (IndexError, AttributeError):
        return ""


def compile_id() -> str:
    """Dynamo's id of the compile in work, such as ``0/0``, or "". Seen in 2.11 to 2.15."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return "" if current is None else str(current)


def frame_number() -> int | None:
    """Dynamo's number of the function in work; None outside of a compile. Seen in 2.11 to 2.15."""
    from torch._guards import CompileContext

    number = getattr(CompileContext.current_compile_id(), "frame_id", None)
    return number if isinstance(number, int) else None


def compile_again() -> None:
    """Let what is being compiled be compiled once more: the first result has told its strides already.

    ``TracingContext.output_strides`` was seen in 2.11 to 2.15.
    """
    strides = getattr(trace_in_work(), "output_strides", None)
    if strides:
        strides.clear()


def trace_in_work() -> Any:
    """Return torch's context of one trace, from Dynamo to its last backward graph, or None outside of one."""
    from torch._guards import TracingContext

    return TracingContext.try_get()


def sharded_inputs() -> list[tuple[tuple[Any, ...], Any]]:
    """Global shape and DTensorSpec of each DTensor input of the graph that AOTAutograd has in work.

    ``TracingContext.fw_metadata.subclass_inp_meta`` was seen in 2.11 to 2.15.
    """
    metadata = getattr(trace_in_work(), "fw_metadata", None)
    found = []
    for entry in getattr(metadata, "subclass_inp_meta", None) or ():
        meta, shape = getattr(entry, "meta", None), getattr(entry, "outer_size", None)
        spec = meta[0] if isinstance(meta, tuple) and meta else None
        if shape is not None and hasattr(spec, "placements") and hasattr(spec, "mesh"):
            found.append((tuple(shape), spec))
    return found


def is_aot_inductor() -> bool:
    """Return whether Inductor is compiling ahead of time, for a shared library. Seen in 2.11 to 2.15."""
    from torch._inductor.virtualized import V

    return bool(getattr(V, "aot_compilation", False))


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """The logger that ``TORCH_LOGS=artifact`` sets; the module's own, where torch was not told in time.

    ``getArtifactLogger`` was seen in 2.11 to 2.15.
    """
    from torch._logging import _internal

    try:
        return _internal.getArtifactLogger(module, artifact)
    except ValueError:
        return logging.getLogger(module)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Hand a text to torch's structured trace, where tlparse finds it. Seen in 2.11 to 2.15."""
    import torch._logging

    structured: Any = getattr(torch._logging, "trace_structured")  # noqa: B009 - not exported
    structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
    )


# --- Caches -------------------------------------------------------------------------------------


def cache_dir() -> str:
    """Inductor's cache folder. Seen in 2.11 to 2.15."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as stock

    return str(stock())


def counters() -> dict[str, int]:
    """Inductor's counters. A cached graph brings the counts of its compile back when it is loaded.

    Seen in 2.11 to 2.15.
    """
    from torch._dynamo.utils import counters as stock

    return stock["inductor"]


def compile_fx(
    gm: fx.GraphModule,
    example_inputs: Any,
    inner_compile: Callable[..., Any],
    patches: Mapping[str, Any],
) -> Callable[..., Any]:
    """Stock's entry for backends. Seen in 2.11 to 2.15."""
    from torch._inductor.compile_fx import compile_fx as stock

    compiled: Any = stock(
        gm, example_inputs, inner_compile=inner_compile, config_patches=dict(patches)
    )
    return compiled


def compile_fx_inner(*args: Any, **kwargs: Any) -> Any:
    """Stock's compile of one lowered graph. Seen in 2.11 to 2.15."""
    from torch._inductor.compile_fx import compile_fx_inner as stock

    return stock(*args, **kwargs)


def run_graph_passes(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """In place of ``compile_fx_inner``: Inductor up to and with its graph passes; the graph then runs as it is.

    ``post_grad_passes``, ``detect_fake_mode`` and ``V.set_fake_mode`` were seen in 2.11 to 2.15.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(gm, bool(kwargs.get("is_inference")))

    def boxed(given: list[Any]) -> Any:
        arguments = list(given)
        given.clear()
        return gm(*arguments)

    boxed._boxed_call = True  # type: ignore[attr-defined]
    return boxed


@contextlib.contextmanager
def no_compile_caches() -> Iterator[None]:
    """Neither Inductor's nor AOTAutograd's cache in the block. Seen in 2.11 to 2.15."""
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    with (
        config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        functorch_config.patch(enable_autograd_cache=False),
    ):
        yield


@contextlib.contextmanager
def keyed_by_rank() -> Iterator[None]:
    """Compiles in the block share no cache entry with other ranks.

    AOTAutograd's key holds a mesh, not where in it this process stands, but its graphs have that burnt in.
    ``torch.compiler.config.cache_key_tag`` was seen in 2.11 to 2.15.
    """
    config: Any = torch.compiler.config
    if (default := default_group()) is None or not moves_data(default):
        yield
        return
    tag = f"{config.cache_key_tag} rank {global_rank()} of {world_size()}"
    with config.patch(cache_key_tag=tag):
        yield


def mode_options(mode: str | None) -> dict[str, Any]:
    """Inductor configuration of a ``mode=``. Raises RuntimeError, naming the known, for another."""
    import torch._inductor

    return dict(torch._inductor.list_mode_options(mode)) if mode not in (None, "default") else {}


def source_of(code: Any) -> str | None:
    """The Python wrapper code of a compiled graph, or None if it has none to show.

    ``CompiledFxGraph.source_code`` was seen in 2.11 to 2.15.
    """
    source = getattr(code, "source_code", None)
    return source if isinstance(source, str) and source else None


def torch_version() -> str:
    """Version and, where torch knows it, commit: both belong in a cache key."""
    return f"{torch.__version__}+{getattr(torch.version, 'git_version', '')}"


def package_dir() -> str:
    """The folder of this package."""
    return os.path.dirname(os.path.abspath(__file__))


# --- Process groups -----------------------------------------------------------------------------


def group_ranks(group: object) -> tuple[int, ...] | None:
    """Global ranks of a group given by name or as an object; None if this process does not know it.

    Accepts the stand-in that tracing makes of a group. ``_resolve_process_group`` and ``real_obj`` were
    seen in 2.11 to 2.15.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    group = getattr(group, "real_obj", group)
    try:
        if isinstance(group, str):
            group = c10d._resolve_process_group(group)
        if isinstance(group, dist.ProcessGroup):
            return tuple(dist.get_process_group_ranks(group))
    except (KeyError, LookupError, RuntimeError, ValueError):
        return None  # a name that nobody registered, or a group already destroyed
    return None


# Backends whose ranks are one process: what one of them compiles, all have.
_OF_ONE_PROCESS = frozenset(("fake", "threaded", "timed"))


def default_group() -> Any:
    """The default process group; None where none is initialised. Seen in 2.11 to 2.15."""
    import torch.distributed as dist

    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def reads_default_group() -> Callable[[], Any]:
    """Return a getter of the default process group without the checks of ``default_group``: each call asks it.

    ``_world.default_pg`` was seen in 2.11 to 2.15.
    """
    from torch.distributed import distributed_c10d

    world: Any = getattr(distributed_c10d, "_world")  # noqa: B009 - not exported
    return lambda: world.default_pg


def moves_data(group: object) -> bool:
    """Return whether a group's ranks are processes of their own."""
    import torch.distributed as dist

    try:
        return dist.get_backend(cast(Any, group)) not in _OF_ONE_PROCESS
    except (RuntimeError, ValueError):
        return False


def job_store() -> Any:
    """The default group's c10d store, or None. ``_get_default_store`` was seen in 2.11 to 2.15."""
    from torch.distributed import distributed_c10d

    get_store: Any = getattr(distributed_c10d, "_get_default_store", None)
    return None if get_store is None else get_store()


def global_rank() -> int:
    """This process's rank in the job."""
    import torch.distributed as dist

    return dist.get_rank()


def real_group_ranks(name: str) -> tuple[int, ...] | None:
    """Global ranks of a group that moves data between processes, by name; None for any other.

    ``_resolve_process_group`` was seen in 2.11 to 2.15.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    try:
        group = c10d._resolve_process_group(name)
        return tuple(dist.get_process_group_ranks(group)) if moves_data(group) else None
    except (KeyError, LookupError, RuntimeError, ValueError):
        return None


def real_groups() -> dict[str, tuple[int, ...]]:
    """Name and ranks of every group of this process that moves data to others."""
    return {
        name: ranks
        for name, ranks in known_groups().items()
        if len(ranks) > 1 and real_group_ranks(name) is not None
    }


def frame_in_work() -> tuple[bool, str]:
    """Of the frame that Dynamo compiles: whether it is part of a function, and ``root_of`` its code.

    A frame is a part if a graph break ends its graph, or if it resumes behind one. Asked again later in the same
    compile, in its backward graph too, the answer is the same. ``compile_subgraph_reason``, ``root_tx`` and
    ``f_locals`` were seen in 2.11 to 2.15.
    """
    trace = trace_in_work()
    known: tuple[bool, str] | None = getattr(trace, "dist_frame", None)
    if known is not None:
        return known
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output: Any = InstructionTranslator.current_tx().output
        code, local = output.root_tx.f_code, output.root_tx.f_locals
    except AttributeError:  # no frame is being compiled
        return False, ""
    resumed = without_resuming(code.co_name) != code.co_name
    reason = getattr(output, "compile_subgraph_reason", None)
    found = resumed or bool(getattr(reason, "graph_break", False)), root_of(_called(code, local))
    if trace is not None:
        trace.dist_frame = found
    return found


def root_of(code: types.CodeType) -> str:
    """A function that Dynamo compiles, as ``name (file:first-last)``: its lines, and its file without folders.

    What goes on behind a graph break is of the function that was broken. ``generated_code_metadata`` was seen in 2.11
    to 2.15.
    """
    from torch._dynamo.resume_execution import ContinueExecutionCache

    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    whole = code if resumed is None else resumed.code
    last = max((line for *_, line in whole.co_lines() if line), default=whole.co_firstlineno)
    where = f"{os.path.basename(whole.co_filename)}:{whole.co_firstlineno}-{last}"
    return f"{without_resuming(whole.co_name)} ({where})"


def _called(code: types.CodeType, local: Mapping[str, Any]) -> types.CodeType:
    """The code of what a frame calls that torch puts around functions of torch and, up to 2.12, of no file."""
    from torch._dynamo import external_utils

    if code.co_filename != external_utils.__file__:
        return code
    called = getattr(local.get("fn"), "forward", local.get("fn"))
    return getattr(getattr(called, "__func__", called), "__code__", code)


def callers() -> frozenset[str]:
    """``function:line`` of everything on this thread's stack, as the lines that lead to a launch are named."""
    found: set[str] = set()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        found.add(f"{without_resuming(frame.f_code.co_name)}:{frame.f_lineno}")
        frame = frame.f_back
    return frozenset(found)


_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")


def without_resuming(name: str) -> str:
    """A function's name in the program, of one that Dynamo made to go on behind a graph break. Seen in 2.11 to 2.15."""
    while found := _RESUMED.fullmatch(name):
        name = found[1]
    return name


def guard_frame(check: Callable[[], bool]) -> None:
    """Compile the frame in work again once ``check`` fails. Without a frame in work, nothing.

    ``GlobalStateSource``, ``Source.make_guard`` and ``GuardBuilder.guard_manager.root`` were seen in 2.11 to 2.15.
    """
    trace = trace_in_work()
    if trace is None:
        return
    from torch._dynamo.source import GlobalStateSource

    guard = GlobalStateSource().make_guard(functools.partial(_HOLDS, check=check))
    trace.guards_context.dynamo_guards.add(guard)


def _HOLDS(builder: Any, guard: Any, *, check: Callable[[], bool]) -> None:
    from torch._dynamo.guards import get_verbose_code_parts

    code = get_verbose_code_parts("the order of launches is still that of all ranks", guard)
    builder.guard_manager.root.add_lambda_guard(lambda _: check(), code, guard.user_stack)


def known_groups() -> dict[str, tuple[int, ...]]:
    """Name and global ranks of every group that this process has made. Seen in 2.11 to 2.15."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch.distributed import distributed_c10d

    c10d: Any = distributed_c10d
    ranks = c10d._world.pg_group_ranks
    return {
        name: tuple(ranks[group]) for group, name in c10d._world.pg_names.items() if group in ranks
    }


def world_size() -> int | None:
    """Ranks of the job, or None where no process group is initialised."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else None


# --- Tests --------------------------------------------------------------------------------------


def fake_tensor_mode() -> Any:
    """A mode in which new tensors have shapes and no storage. Seen in 2.11 to 2.15."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def run_on_local_tensors(
    call: Callable[..., Any], world_size: int, arguments: Iterable[Mapping[int, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    """Call ``call`` once on tensors that hold every rank's value; its flat results, by rank.

    ``LocalTensorMode`` was seen in 2.11 to 2.15.
    """
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    with LocalTensorMode(world_size):
        results = call(*(LocalTensor(dict(of_ranks)) for of_ranks in arguments))
    flat = results if isinstance(results, (list, tuple)) else [results]
    return [[tensor._local_tensors[rank] for tensor in flat] for rank in range(world_size)]


def init_fake_group(world_size: int, rank: int) -> None:
    """Initialise the default process group on fake ranks. Seen in 2.11 to 2.15."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


# --- Graphs as passes see them, without a compile ------------------------------------------------


class _Reached(Exception):
    pass


def post_grad_until_ours(gm: fx.GraphModule, inputs: Any, is_inference: bool) -> None:
    """Run stock's post-grad passes up to ``post_grad_custom_post_pass``. Seen in 2.11 to 2.15."""
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.virtualized import V

    def stop(graph: fx.Graph) -> None:
        raise _Reached

    config: Any = inductor_config()
    with config.patch(post_grad_custom_post_pass=stop), V.set_fake_mode(detect_fake_mode(inputs)):
        try:
            post_grad_passes(gm, is_inference)
        except _Reached:
            return


def compiles_autograd() -> bool:
    """Return whether compiled autograd traces backward passes anew: no backward graph of their forward runs.

    ``compiled_autograd_enabled`` was seen in 2.11 to 2.15.
    """
    from torch._dynamo import compiled_autograd, config

    return config.compiled_autograd or compiled_autograd.compiled_autograd_enabled


@contextlib.contextmanager
def backward_at_once() -> Iterator[None]:
    """Compile backward graphs with their forward ones, not when they are first needed.

    ``force_non_lazy_backward_lowering`` was seen in 2.11 to 2.15.
    """
    from torch._functorch import config

    name = "force_non_lazy_backward_lowering"
    if not hasattr(config, name):
        yield
        return
    with config.patch({name: True}):
        yield
