"""Make, replace and erase nodes so that every node keeps a true fake value and its user's line;
try an edit on a copy.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx

from inductor_passes.errors import InvariantError
from inductor_passes.graph.collectives import JOINT, MEMBERS, argument
from inductor_passes.graph.printing import CAUSE
from inductor_passes.torch_compat.aot import with_memory_of, with_memory_of_its_own
from inductor_passes.torch_compat.nodes import is_impure

aten = torch.ops.aten
prims = torch.ops.prims
CAST = prims.convert_element_type.default
# What a new node inherits from the one it stands for: the user's line and where Dynamo saw it.
INHERITED = (
    "stack_trace",
    "source_fn_stack",
    "fwd_source_fn_stack",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "partitioner_tag",
    "original_aten",
    "custom",
    CAUSE,
    MEMBERS,
    JOINT,
)
# Ops that only place elements, each of them somewhere: they commute with everything elementwise.
PLACING = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.clone.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.alias.default,
        aten.detach.default,
    }
)


def value(node: fx.Node) -> Any:
    """The fake value of a node: a tensor, or a tuple of them; shapes are local."""
    return node.meta.get("val")


def tensor(node: object) -> torch.Tensor | None:
    """The fake tensor of a node; None if there is no single one."""
    found = value(node) if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def static_shape(node: object) -> tuple[int, ...] | None:
    """The local shape, if it holds no symbol."""
    found = tensor(node)
    if found is None or not all(isinstance(size, int) for size in found.shape):
        return None
    return tuple(found.shape)


def emit(
    graph: fx.Graph,
    target: object,
    args: tuple[Any, ...],
    like: fx.Node,
    kwargs: Mapping[str, Any] | None = None,
    value_of: Callable[[fx.Node], object] | None = None,
) -> fx.Node:
    """Call ``target`` at the graph's insertion point, in the name of ``like``; ``value_of``:
    what finds its value.
    """
    assert callable(target)  # the name of a method or a submodule is not emitted anew
    node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta.update({key: like.meta[key] for key in INHERITED if key in like.meta})
    node.meta["val"] = (value_of or computed)(node)
    return node


def computed(node: fx.Node) -> Any:
    """The fake value that a node's op makes of the values of its inputs."""
    args = fx.node.map_arg(node.args, value)
    kwargs = fx.node.map_arg(node.kwargs, value)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def replace(old: fx.Node, new: fx.Node, name: str) -> None:
    """Let every user of ``old`` read ``new``. Raises InvariantError unless shape and dtype
    agree.
    """
    was, now = tensor(old), tensor(new)
    if was is None or now is None or was.dtype != now.dtype or was.shape != now.shape:
        raise InvariantError(
            f"The pass {name} replaced %{old.name} by something else: {_described(was)} by "
            f"{_described(now)}.",
            "",
            f"Leave it out with options={{'disable': ['{name}']}}.",
        )
    old.replace_all_uses_with(new)


def erase_unused(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Erase these nodes, and what only they read, as far as nobody reads them."""
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node.users or node.op != "call_function" or node._erased:
            continue
        sources = list(node.all_input_nodes)
        graph.erase_node(node)
        pending.extend(source for source in sources if _is_pure(source))


def permutation(node: fx.Node, rank: int) -> list[int]:
    """Return which dimension of its input each dimension of a permuted or transposed one is."""
    if node.target is aten.permute.default:
        dims = cast(list[int], argument(node, "dims"))
        return [dim % rank for dim in dims]
    order = list(range(rank))
    if node.target is aten.t.default:
        return order[::-1]
    a, b = cast(tuple[int, int], node.args[1:3])
    order[a], order[b] = order[b], order[a]
    return order


def chain_above(node: object, through: frozenset[object] = PLACING) -> list[fx.Node]:
    """``node``, its input, the input of that ... as long as ops of ``through`` lead up; the
    source last.
    """
    found: list[fx.Node] = []
    while isinstance(node, fx.Node):
        found.append(node)
        if node.op != "call_function" or node.target not in through:
            break
        node = node.args[0]
    return found


def again(graph: fx.Graph, chain: Sequence[fx.Node], source: fx.Node) -> fx.Node:
    """Redo the ops of ``chain``, the last first, on ``source``; returns what stands for
    ``chain[0]``.
    """
    for node in reversed(chain):
        source = emit(graph, node.target, (source, *node.args[1:]), node, node.kwargs)
    return source


def _is_pure(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return isinstance(node.target, torch._ops.OpOverload) and not is_impure(node)


def _described(value: torch.Tensor | None) -> str:
    return "no tensor" if value is None else f"{value.dtype} {list(value.shape)}"


class Values:
    """Fake values as ``edit.computed`` finds them.

    Each has memory of its own where its operator makes new memory, and its first input's where it
    is a view of that.
    """

    def __init__(self) -> None:
        # The value, and for a view how many elements behind the start of its input it starts.
        self._cached: dict[object, tuple[torch.Tensor, int | None]] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node, from those of its inputs."""
        if not _makes_one_value(node.target):
            return computed(node)
        key = node.target, _key_of(node.args), _key_of(node.kwargs)
        source = tensor(node.args[0]) if node.args else None
        if key in self._cached:
            cached, behind = self._cached[key]
            if behind is None:
                return with_memory_of_its_own(cached)
            assert source is not None
            made = with_memory_of(cached, source, behind)
            return computed(node) if made is None else made
        found = computed(node)
        if not isinstance(found, torch.Tensor) or not _is_static(found):
            return found
        if source is not None and _is_static(source) and _shares_memory(found, source):
            behind = int(found.storage_offset()) - int(source.storage_offset())
            self._cached[key] = found, behind
        elif _makes_memory(node.target):
            self._cached[key] = found, None
        return found


def _is_static(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(isinstance(each, int) for each in numbers)


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except NotImplementedError:  # a wrapper subclass or an opaque tensor has no storage
        return False


def _makes_one_value(target: object) -> bool:
    """Return whether an operator has one result and writes nothing."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return len(target._schema.returns) == 1 and not target._schema.is_mutable


def _makes_memory(target: object) -> bool:
    """Return whether an operator's result lies in new memory, by its schema."""
    assert isinstance(target, torch._ops.OpOverload)
    return target._schema.returns[0].alias_info is None


def _key_of(given: object) -> object:
    """All of an argument that a value's shape can depend on, hashable."""
    if isinstance(given, fx.Node):
        return _key_of(value(given))
    if isinstance(given, torch.Tensor):
        return given.dtype, _key_of(tuple(given.shape)), _key_of(given.stride()), given.device
    if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(given), given.node.expr
    if isinstance(given, (list, tuple)):
        return tuple(map(_key_of, given))
    if isinstance(given, dict):
        return tuple((name, _key_of(each)) for name, each in given.items())
    return type(given), given


class TrialCopy:
    """Hold a copy of a graph, ``graph``, that may be edited; the original stays as it is until
    ``commit``.

    ``in_module``: the copy has a module of its own, with what the original's holds for it. A pass
    that adds a constant or a subgraph then adds it there, and a trial that is dropped leaves
    nothing behind. Without it the copy has no module: it is for an edit that is only priced.
    """

    def __init__(self, graph: fx.Graph, *, in_module: bool = False) -> None:
        self._original, self.graph = graph, copy.deepcopy(graph)
        if in_module:
            fx.GraphModule(graph.owning_module or {}, self.graph)  # the graph keeps it

    def twins(self) -> dict[fx.Node, fx.Node]:
        """Return the copy of each node, while neither graph was edited."""
        return dict(zip(self._original.nodes, self.graph.nodes, strict=True))

    def commit(self) -> None:
        """Let the original hold the nodes of the copy, by the names that they have there."""
        graph, owner, module = (
            self._original,
            self._original.owning_module,
            self.graph.owning_module,
        )
        for node in self.graph.nodes if owner is not None else ():
            name = str(node.target).partition(".")[0]
            if node.op == "get_attr" and not hasattr(owner, name):
                setattr(owner, name, getattr(module, name))
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
        # Names of the erased nodes are free again: a committed node is called as it was in the
        # trial, which the records of its passes say.
        graph._graph_namespace = fx.graph._Namespace()
        copied: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, copied)
        last = self.graph.output_node()
        copied[last] = graph.output(result)
        copied[last].meta = dict(last.meta)
