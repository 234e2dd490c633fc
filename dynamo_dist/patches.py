"""List what ``enable()`` changes in torch, and what a user would lose without each kind, worst
first.

The list is made by the functions that make the changes, and its sentences are theirs: how is the
first of the function's docstring, why the first of the module that asks for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from dynamo_dist import patch_stack
from dynamo_dist.settings import SUPPORTED, DistConfig
from dynamo_dist.torch_compat import dtensor_dispatch, dynamo_compiler
from dynamo_dist.torch_compat.patching import ConfigDefault, OwnState, SetAttribute, makers_recorded

if TYPE_CHECKING:
    from dynamo_dist.torch_compat.patching import Patch

# Why there is no issue upstream.
HOOK = "no public hook"
FAULT = "torch's fault, no issue known"

# By the function that makes the change, with its module: the loss, and the issue upstream or why
# there is none.
LOSSES = {
    "aot_runtime.pending_inputs_have_gradients": (
        "gradients behind an input in flight are silently missing",
        FAULT,
    ),
    "aot_runtime.write_to_pending_inputs": (
        "writes to an input in flight are silently lost",
        FAULT,
    ),
    "aot_runtime.on_forward_with_tangents": (
        "second gradients through a graph are silently incomplete",
        FAULT,
    ),
    "aot_gradients.partial_inputs_stay_partial": (
        "a pending input that is trained and changed in place is wrong",
        FAULT,
    ),
    "dtensor_strategies.integers_in_partials": (
        "whole numbers that are to be a pending sum are cut off",
        FAULT,
    ),
    "dynamo_dtensors.on_tensor_attributes": (
        "gradients that a graph leaves on parameters are silently lost; attributes of DTensors and "
        "of what collectives return break",
        FAULT,
    ),
    "writes.writes_patches": ("writes to a gathered view of a DTensor are silently lost", FAULT),
    "dtensor_strategies.on_strategy": (
        "operators on DTensors gather, refuse or compute wrong numbers",
        FAULT,
    ),
    "dtensor_strategies.on_failed_propagation": (
        "means over uneven shards are wrong; operators without a strategy fail",
        FAULT,
    ),
    "dtensor_strategies.on_dispatch": (
        "as_strided, collectives and in-place operators on DTensors fail or are wrong",
        FAULT,
    ),
    "dtensor_specs.in_context_parallel": ("masks are wrong in context_parallel on the CPU", HOOK),
    "aot_partition.draw_once": (
        "a checkpoint on CUDA draws another dropout mask in its backward",
        FAULT,
    ),
    "dynamo_trackers.retrack": ("graphs made for one group or mesh serve another one", HOOK),
    "ddp.on_eager_ddp_forward": ("an eager forward of DDP among compiled ones is not seen", HOOK),
    "fsdp.on_eager_forward": ("an eager forward of FSDP2 among compiled ones is not seen", HOOK),
    "aot_partition.keep_in_its_pass": (
        "ranks launch in forward or backward as each one's sizes say, and hang",
        HOOK,
    ),
    "dtensor_placements.cut_empty_shards": (
        "a rank whose shard is empty leaves out launches, and all hang",
        FAULT,
    ),
    "aot_partition.drop_dead_chains": (
        "dead collectives run, twice where another waits for them",
        FAULT,
    ),
    "dynamo_frames.on_what_is_left_to_python": (
        "a rank that leaves a function to Python launches in another order",
        HOOK,
    ),
    "dynamo_frames.ask_before_giving_up": (
        "at recompile_limit one rank leaves the order of all others",
        HOOK,
    ),
    "dtensor_dispatch.on_clipping": (
        "gradients of which some are plain cannot be clipped together",
        FAULT,
    ),
    "dynamo_meshes.on_group_creation": (
        "groups made in a compiled function break the graph",
        HOOK,
    ),
    "dynamo_meshes.on_mesh_creation": (
        "meshes made in a compiled function break the graph",
        HOOK,
    ),
    "dynamo_trackers.on_object": ("calls of torch.distributed break the graph", HOOK),
    "dynamo_calls.on_graph_end": (
        "async_op=True breaks the graph, and so does implicit_replication",
        HOOK,
    ),
    "dynamo_building.on_tensor_uses": (
        "a buffer in flight may be read; sizes told by data end in an error",
        HOOK,
    ),
    "dynamo_modules.on_methods": ("FSDP2, DDP and their state break the graph", HOOK),
    "dynamo_modules.on_reads": ("parameters of FSDP2 and DDP are read as shards in a graph", HOOK),
    "dynamo_modules.on_module_compiled": (
        "hooks of the compiled module, tensor parallel ones too, break the graph",
        HOOK,
    ),
    "fsdp.on_sharding": ("a model that is sharded after its compile is many graphs", HOOK),
    "dynamo_modules.on_module_backward_hooks": (
        "full backward hooks of a module break the graph",
        FAULT,
    ),
    "dynamo_modules.on_tensor_method": (
        "backward() breaks the graph of a training step; wait() breaks with another reason",
        HOOK,
    ),
    "dynamo_calls.see_histories_of_subclasses": (
        "autograd.grad of DTensors fails in a graph",
        FAULT,
    ),
    "dynamo_trackers.on_values": (
        "optimizers, a Work or a boxed group from outside break the graph, and each learning rate "
        "is another graph",
        HOOK,
    ),
    "dynamo_trackers.extend_builtins": (
        "str() and isinstance() of meshes, groups and placements break",
        FAULT,
    ),
    "dynamo_trackers.extend_class_tracker": (
        "type(mesh) == DeviceMesh and hasattr(Shard, ...) break",
        FAULT,
    ),
    "dynamo_meshes.mesh_as_context": ("'with mesh:' breaks the graph", HOOK),
    "dynamo_trackers.on_codegen": (
        "placements that a function returns or keeps break the graph",
        HOOK,
    ),
    "dynamo_guards.register_guards": (
        "nested_compile_region with a mesh or a group is an error",
        HOOK,
    ),
    "dynamo_meshes.derive_by_overload": ("Inductor refuses a slice of a mesh in a graph", FAULT),
    "aot_aliases.on_output_aliases": (
        "a view of a DTensor that a function returns is an error",
        FAULT,
    ),
    "aot_runtime.on_plain_tangent": (
        "an output that no loss uses ends the backward with an error",
        FAULT,
    ),
    "aot_runtime.keep_first_symbols": (
        "dynamic sizes recurse without end; equal meshes leave a graph without an input",
        FAULT,
    ),
    "dtensor_dispatch.around_traced_calls": (
        "one_hot, interpolate and others fail on DTensors, compiled",
        FAULT,
    ),
    "aot_gradients.replicas_in_backward": (
        "the backward of cummax, split and others fails on DTensors",
        FAULT,
    ),
    "aot_tracing.pass_context": (
        "autograd functions of as many tensors as arguments lose their context",
        FAULT,
    ),
    "aot_tracing.gradients_are_apart": (
        "a backward that reduces its gradient in place does not compile",
        FAULT,
    ),
    "aot_partition.save_states_before_objects": (
        "dropout in a checkpoint on DTensors is an error",
        FAULT,
    ),
    "dtensor_placements.keep_strided_shards": (
        "results in strided shards are an error; wrapping takes longer",
        FAULT,
    ),
    "dtensor_placements.count_strided_shards_with_real_tensors": (
        "strided shards do not trace",
        FAULT,
    ),
    "dtensor_placements.fix_split_factors": (
        "with dynamic sizes, a view that joins dimensions is refused",
        FAULT,
    ),
    "dynamo_dtensors.sizes_of_bases_are_inputs": (
        "with dynamic sizes, a view of a DTensor is no input",
        FAULT,
    ),
    "dtensor_strategies.track_symbolic_results": (
        "with dynamic sizes, convolutions and products of sizes fail",
        FAULT,
    ),
    "dtensor_ranks.random_on_cpu": (
        "torch.distributed.tensor.rand and randn fail on the CPU",
        FAULT,
    ),
    "dynamo_calls.allow_point_to_point": ("P2POp breaks the graph", HOOK),
    "dynamo_compiler.CacheKeyTag": ("torch's caches give graphs of other strategies", HOOK),
    "inductor_code.meshes_by_content": (
        "graphs that take meshes are compiled anew in each process",
        FAULT,
    ),
    "inductor_code.sources_by_name": (
        "graphs of FSDP2 and DDP are compiled anew in each process",
        FAULT,
    ),
    "dynamo_guards.wrap_checks": ("each call compares specs and meshes field by field", HOOK),
    "aot_gradients.wrap_gradients": ("each backward wraps and adds gradients one by one", HOOK),
    "inductor_code.wrap_compiled_code": ("each call runs operators through autograd", HOOK),
    "dynamo_frames.frames_left_alone": (
        "Dynamo compiles this package's functions below a broken one",
        HOOK,
    ),
    "inductor_cpp.few_libraries": ("a cold start builds a library for each C++ kernel", HOOK),
    "inductor_cpp.probed_once_a_host": (
        "each process tries the CPU's vector units for seconds",
        HOOK,
    ),
    "inductor_cpp.only_for_builds": ("a first compile on a host builds headers of 150 MiB", HOOK),
    "dtensor_placements.redistribute_changes": (
        "reports do not say which change of placement caused a collective",
        HOOK,
    ),
    "live.Listen": ("reports have neither graph breaks nor recompiles", HOOK),
}


OWN_STATE = "own state"

_GROUPING = (__name__, "dynamo_dist.patch_stack", "dynamo_dist.cli.doctor")
# Lists of what other modules ask for.
_TABLES = ("dynamo_dist.sharding.rules",)
_ISSUE = re.compile(r"(?:https://github\.com/)?pytorch/pytorch(?:/issues/|/pull/|#)\d+")
_VERSIONS = re.compile(
    r"\b(?:[Ss]een|are there|is there)[^.]*?\b(2\.\d+(?:\s+(?:to|and)\s+2\.\d+)?)"
)


@dataclass(frozen=True, slots=True)
class Listed:
    """Changes of one kind: places of torch that one function changes for one reason."""

    places: tuple[str, ...]
    how: str
    why: str
    made_by: str
    versions: str  # "2.13 to 2.15"; empty where it is not said
    issue: str  # of upstream; empty where there is none
    what: str = "patch"  # or "setting", of torch's configuration, or "own state"


@dataclass(frozen=True, slots=True)
class Kind:
    """Changes of torch in one kind of place: by one function, or in the very same places.
    ``place``: the first.

    ``lost``: what a user would lose without. ``upstream``: an issue, or why there is none.
    """

    place: str
    places: int
    lost: str
    upstream: str
    versions: str
    made_by: tuple[str, ...]
    what: str


def kinds(config: DistConfig | None = None) -> list[Kind]:
    """What ``enable()`` changes in torch, an entry a kind of place, the worst to lose first;
    entries of tables are summed up.
    """
    found: dict[str, list[Listed]] = {}
    for each in listed(config):
        if each.what != OWN_STATE:
            found.setdefault(each.made_by, []).append(each)
    joined: dict[frozenset[str], list[Listed]] = {}
    for entries in found.values():
        joined.setdefault(frozenset(p for each in entries for p in each.places), []).extend(entries)
    order = [lost for lost, _ in LOSSES.values()]
    return sorted(
        map(_kind, joined.values()),
        key=lambda kind: order.index(kind.lost) if kind.lost in order else len(order),
    )


def _kind(entries: Sequence[Listed]) -> Kind:
    makers = tuple(dict.fromkeys(each.made_by for each in entries))
    names = (".".join(each.split(".")[-2:]) for each in makers)
    lost, why = next((LOSSES[n] for n in names if n in LOSSES), (entries[0].how, HOOK))
    return Kind(
        place=entries[0].places[0],
        places=sum(len(each.places) for each in entries),
        lost=lost,
        upstream=next((each.issue for each in entries if each.issue), why),
        versions=next((each.versions for each in entries if each.versions), SUPPORTED).removeprefix(
            "torch "
        ),
        made_by=makers,
        what=entries[0].what,
    )


def listed(config: DistConfig | None = None) -> list[Listed]:
    """Every change that ``enable()`` makes with ``config``, grouped, in order; nothing is
    applied.
    """
    with makers_recorded():
        made = patch_stack.patches(config or DistConfig.from_env())
    return [_listed(maker, reason, patches) for (maker, reason), patches in by_kind(made).items()]


def by_kind(made: Iterable[object]) -> dict[tuple[str, str], list[object]]:
    """Changes by the function that made them and the module that asked for them; made under
    ``makers_recorded()``.
    """
    kinds: dict[tuple[str, str], list[Any]] = {}
    for patch in made:
        kinds.setdefault(_maker_and_reason(patch), []).append(patch)
    return kinds


def _maker_and_reason(patch: Any) -> tuple[str, str]:
    """The function that made it, and the module that asked for it, which says why."""
    names = [name for name, _ in _makers(patch)]
    if not names:
        return _name(type(patch)), type(patch).__module__
    modules = [name.rpartition(".")[0] for name in names]
    asking = (each for each in modules if not _is_compat(each) and each not in _TABLES)
    return names[0], next(asking, modules[-1])


def _is_compat(module: str) -> bool:
    return module.startswith("dynamo_dist.torch_compat.")


def _makers(patch: Patch) -> list[tuple[str, str]]:
    return [
        (name, doc)
        for name, doc in getattr(patch, "makers", ())
        if name.startswith("dynamo_dist.") and name.rpartition(".")[0] not in _GROUPING
    ]


def _listed(maker: str, module: str, patches: Sequence[Any]) -> Listed:
    docs = [doc for _, doc in _makers(patches[0])] or [type(patches[0]).__doc__ or ""]
    text = " ".join(docs)
    versions, issue = _VERSIONS.search(text), _ISSUE.search(text)
    why = "" if _is_compat(module) else _sentence(sys.modules[module].__doc__ or "")
    # A list of changes says what its module is for.
    how = why if maker.endswith("patches") else _sentence(docs[0])
    return Listed(
        places=tuple(_place(patch) for patch in patches),
        how=how,
        why="" if why == how else why,
        made_by=maker.removeprefix("dynamo_dist."),
        versions=re.sub(r"\s+", " ", versions[1]) if versions else "",
        issue=issue[0] if issue else "",
        what=_what(patches[0]),
    )


def _what(patch: Patch) -> str:
    if isinstance(patch, OwnState):
        return OWN_STATE
    return "setting" if isinstance(patch, (ConfigDefault, dynamo_compiler.CacheKeyTag)) else "patch"


def _sentence(doc: str) -> str:
    """The first of a docstring, on one line."""
    first = re.split(r"(?<=[.:])\s+(?=[A-Z`\"])|\n\n", doc.strip(), maxsplit=1)[0]
    return re.sub(r"\s+", " ", first).rstrip(":")


def _place(patch: Patch) -> str:
    if isinstance(patch, SetAttribute):
        return f"{_name(patch.owner)}.{patch.name}"
    found = getattr(patch, "of", getattr(patch, "key", type(patch)))
    return ", ".join(map(_name, found)) if type(found) is tuple else _name(found)


def _name(thing: Any) -> str:
    kind = type(thing)  # not isinstance: objects of torch warn when their class is asked for
    if issubclass(kind, (str, *dtensor_dispatch.OPERATORS)):
        return str(thing)
    if issubclass(kind, ModuleType):
        return str(thing.__name__)
    if issubclass(kind, (type, FunctionType, BuiltinFunctionType)):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"a {_name(kind)}"
