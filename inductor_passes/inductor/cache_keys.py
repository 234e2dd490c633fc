"""Key a traced graph so that ranks with equal code share a cache entry, and say why a lookup
missed.

Each rank traces for itself: what it read of its rank, coordinate or environment is a number in its
graph, and another number is another graph, with a key of its own. What is left to differ is names
of groups, which become names that all ranks have, and the rank in the key, which stays where
something that compiles the graph may ask for it.

Everything that AOTAutograd and Inductor make code of has to be in it: operators and their
arguments, fake values, marks for the partitioner, and what AOTAutograd has noted of inputs and
outputs. Groups stand in it by names that all ranks have, meshes by what they hold beside a rank's
place in them. What has no text that is the same in another process has no digest.

The parts of that key lie beside Inductor's cache, one small file for each graph of a program on
each rank.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from inductor_passes import registry
from inductor_passes.graph.node_kinds import tensors
from inductor_passes.inductor.local_graphs import graphs_inside
from inductor_passes.records import CacheRecord
from inductor_passes.report import recorder
from inductor_passes.rewrite.all_reduce_slice import asks_for_position
from inductor_passes.torch_compat import c10d, dynamo, inductor, meshes
from inductor_passes.torch_compat.aot import numbers_of
from inductor_passes.torch_compat.nodes import size_hint

FIRST = "first time"
UNKNOWN = "nothing of its key that is known has changed"


def why_missed(graph: fx.Graph, ours: Mapping[str, str | None], graph_id: str) -> CacheRecord:
    """Compare the key of a graph that is compiled now with that of its last compile, and keep it.

    ``graph``: as our passes get it. ``ours``: what they add to its key; None is what forbids to
        keep it in a cache.
    ``graph_id``: its name in this process.
    """
    local, remote, off = map(
        inductor.get_config, ("fx_graph_cache", "fx_graph_remote_cache", "force_disable_caches")
    )
    if off or not (local or remote):
        return CacheRecord("off", ("Inductor's cache is off",))
    if without := [name for name, value in ours.items() if value is None]:
        return CacheRecord("off", tuple(f"{name} has no uuid()" for name in without))
    parts = {**ours, **_of_torch(graph)}
    now = {name: _digest(str(value)) for name, value in parts.items()}
    name = _digest(_name(graph_id))
    last = recorder.kept("keys", name)
    recorder.keep("keys", name, now)
    if not isinstance(last, dict):
        return CacheRecord("miss", (FIRST,))
    changed = [name for name in sorted(now.keys() | last) if now.get(name) != last.get(name)]
    return CacheRecord("miss", tuple(changed) or (UNKNOWN,))


def _of_torch(graph: fx.Graph) -> dict[str, str]:
    """Parts of the key that are torch's own."""
    inputs: list[str] = []
    others: list[str] = []
    for node in graph.nodes:
        values = [f"{list(t.shape)} {t.dtype} {t.device}" for t in tensors(node.meta.get("val"))]
        (inputs if node.op == "placeholder" else others).append(f"{node.format_node()} {values}")
    settings = {f"torch._inductor.config.{k}": v for k, v in inductor.values_set().items()}
    return {
        "inputs": "\n".join(inputs),
        "graph": "\n".join(others),
        "cache_key_tag": str(torch.compiler.config.cache_key_tag),
        **settings,
    }


def _name(graph_id: str) -> str:
    """What is the same of a graph in every run of a program, also when its lines or sizes
    change.
    """
    function = dynamo.frame_in_work()[1].partition(":")[0]
    rank = c10d.global_rank() if c10d.world_size() else 0
    return f"{sys.argv[:1]} {function} {graph_id} {rank}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Code of users that Inductor calls while it compiles a graph.
_OF_USERS = (
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
    *("_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)


def name_groups_alike(gm: fx.GraphModule) -> None:
    """Call each group of a graph, and of those inside it, by the name that all ranks have for it.

    Not where an extension sets up memory under the group's own name.
    """
    if c10d.default_group() is None or any(e.binds_groups() for e in registry.extensions()):
        return
    for graph in graphs_inside(gm):
        for node in graph.nodes:
            for at, name in _common_names(node, node.args, node.kwargs):
                if at is None:
                    node.update_kwarg(_GROUP, name)
                else:
                    node.update_arg(at, name)


def is_rank_free(gm: fx.GraphModule, patches: Mapping[str, Any]) -> bool:
    """Return whether equal graphs compile to equal code on all ranks: nothing that compiles them
    asks for the rank.

    ``patches``: Inductor's options for this compile. Passes of others may ask for anything.
    """
    if not all(map(registry.is_built_in, registry.ordered_passes())):
        return False
    if any(_is_of_user(patches.get(key, inductor.get_config(key))) for key in _OF_USERS):
        return False
    return not any(asks_for_position(graph) for graph in graphs_inside(gm))


def _is_of_user(given: Any) -> bool:
    """Return whether an option is a pass that is not ours, or ours with one of a user's before
    it.
    """
    attachment = getattr(given, "attachment", None)
    if attachment is None:
        return given is not None
    return attachment.chain_pre is not None or attachment.chain_post is not None


def _common_names(
    node: fx.Node, args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[tuple[int | None, str]]:
    """Where groups stand among arguments (None: as a keyword), and the names that all ranks have
    for them.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return
    for at, argument in enumerate(node.target._schema.arguments):
        if argument.name != _GROUP:
            continue
        if isinstance(name := kwargs.get(_GROUP), str):
            yield None, c10d.common_name(name)
        elif at < len(args) and isinstance(name := args[at], str):
            yield at, c10d.common_name(name)


_GROUP = "group_name"


_MARKS = ("partitioner_tag", "recompute", "ac_graph_id", "custom", "must_be_in_backward")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))
_NAMED = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.SymFloat,
    torch.SymBool,
    enum.Enum,
)
_MOST_BYTES = 2**16  # of a constant of a graph


class NoDigestError(Exception):
    """Something in a graph has no text that is the same in another process."""


class TracedProgram:
    """The digest of a graph and ``more`` that its code depends on. ``meshes``: those that were met,
    by what they hold.

    Raises NoDigestError, which names what has none.
    """

    def __init__(self, graph: fx.GraphModule, *more: object) -> None:
        self.meshes: dict[str, DeviceMesh] = {}
        lines = [*self._graph(graph), self._text(more)]
        self.digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _graph(self, gm: fx.GraphModule) -> Iterator[str]:
        numbers: dict[fx.Node, _Number] = {}
        for number, node in enumerate(gm.graph.nodes):
            numbers[node] = _Number(number)
            number_of: Any = numbers.__getitem__
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), number_of)
            target = node.target if node.op == "call_function" else str(node.target)
            yield self._text((node.op, target, self._alike(node, args, kwargs)))
            yield self._text([node.meta.get("val"), *map(node.meta.get, _MARKS)])
            if node.op == "get_attr":
                yield from self._attribute(gm, str(node.target))

    def _alike(self, node: fx.Node, args: Any, kwargs: Any) -> tuple[object, object]:
        """Arguments, with the name that all ranks have for a group."""
        listed, named = list(args), dict(kwargs)
        for at, name in _common_names(node, listed, named):
            if at is None:
                named[_GROUP] = name
            else:
                listed[at] = name
        return listed, named

    def _attribute(self, gm: fx.GraphModule, name: str) -> Iterator[str]:
        value: Any = gm
        for each in name.split("."):
            value = getattr(value, each)
        if isinstance(value, fx.GraphModule):
            yield from self._graph(value)
            return
        whole = type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu"
        if not whole or value.untyped_storage().nbytes() > _MOST_BYTES:
            raise NoDigestError(f"a constant of the graph ({type(value).__name__})")
        yield hashlib.sha256(repr(numbers_of(value)).encode()).hexdigest()

    def _text(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, torch.SymInt):  # what it launches is told by its hint
            return f"SymInt {value} {size_hint(value)}"
        if isinstance(value, _NAMED):
            return f"{type(value).__name__} {value}"
        if isinstance(value, (torch.Size, tuple, list)):
            return f"{type(value).__name__} [{', '.join(map(self._text, value))}]"
        if isinstance(value, Mapping):
            items = (f"{self._text(key)}: {self._text(value[key])}" for key in value)
            return f"{type(value).__name__} {{{', '.join(items)}}}"
        if isinstance(value, (set, frozenset)):
            return f"{type(value).__name__} {{{', '.join(sorted(map(self._text, value)))}}}"
        if isinstance(value, slice):
            return f"slice {self._text((value.start, value.stop, value.step))}"
        return self._of_object(value)

    def _of_object(self, value: Any) -> str:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if isinstance(value, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            return f"{kind} {value}"
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            if "<" in value.__qualname__:
                raise NoDigestError(f"{value.__qualname__}, a function inside another")
            return f"{value.__module__}.{value.__qualname__}"
        if (mesh := meshes.mesh_of(value)) is not None:
            text = meshes.content(mesh, of_rank=False)
            self.meshes[text] = mesh
            return text
        if isinstance(value, torch.Tensor):
            return f"{kind} {self._text(self._of_tensor(value))}"
        if dataclasses.is_dataclass(value):
            fields = (field.name for field in dataclasses.fields(value))
            held = [(name, getattr(value, name, None)) for name in fields]
            return f"{kind} {self._text(held)} {_shown(value)}"
        if _shown(value):
            return f"{kind} {_shown(value)}"
        raise NoDigestError(kind)

    def _of_tensor(self, value: torch.Tensor) -> list[object]:
        found: list[object] = [value.dtype, value.device, value.shape, value.requires_grad]
        if hasattr(value, "__tensor_flatten__"):
            names, context = value.__tensor_flatten__()
            return [*found, context, *(getattr(value, name) for name in names)]
        if value.layout == torch.strided:
            found += [value.stride(), value.storage_offset()]
        return [*found, value.layout]


@dataclasses.dataclass(frozen=True, slots=True)
class _Number:
    """An argument that is a node: its number in the graph."""

    node: int


def _shown(value: object) -> str:
    """A placement's own text, for those that are made in C++; "" for anything else."""
    module = type(value).__module__
    return repr(value) if module.startswith("torch.distributed.tensor.placement") else ""
