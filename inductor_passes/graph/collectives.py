"""Find collectives and their waits in a post-grad graph: kind, group, payload, reduce op, number
in the program.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import torch
from torch import fx

from inductor_passes.torch_compat.c10d import group_size_of
from inductor_passes.torch_compat.nodes import expect, size_hint

# Of a launch: numbers of the program's launches that it stands for. New nodes inherit it
# (``rewrite/edit.py``).
MEMBERS = "dist_launches"
# Of a launch: what became of the joint graph (``split/decision.py``).
JOINT = "dist_joint"
_PART = re.compile(
    r"(?P<launch>[0-9]{1,9}): part [0-9]{1,9} of (?P<parts>[0-9]{1,9}) along (?P<along>.+)"
)


def numbers_of(members: Iterable[fx.Node]) -> tuple[int | str, ...]:
    """The numbers of several launches, for the one that takes their place."""
    return tuple(number for member in members for number in member.meta.get(MEMBERS, ()))


def part_of(launch: fx.Node, part: int, parts: int, along: str) -> tuple[str, ...]:
    """Return the number of one chunk of a launch, with all that ranks must cut the same way.

    There is one entry for each number of the launch, and none if the launch has no number.
    """
    numbers = launch.meta.get(MEMBERS, ())
    return tuple(f"{number}: part {part + 1} of {parts} along {along}" for number in numbers)


def launch_in_parts(number: int | str) -> tuple[int, int, str] | None:
    """The program's number, the count of parts and how they lie, of a part's number; None for a
    whole launch's.
    """
    found = _PART.fullmatch(number) if isinstance(number, str) else None
    return (int(found["launch"]), int(found["parts"]), found["along"]) if found else None


HOST_NAMESPACE = "inductor_passes_host"  # of copies to the host's memory and back
HOST = "host"  # the channel that they go over, in place of a group
_namespaces = {"_c10d_functional", "c10d_functional", HOST_NAMESPACE}
# Longest first: "all_gather" must not be read as "gather".
KINDS = (
    "reduce_scatter",
    "all_reduce",
    "all_gather",
    "all_to_all",
    "broadcast",
    "batch_p2p",
    "permute",
    "gather",
    "scatter",
    "reduce",
    "isend",
    "irecv",
    "send",
    "recv",
    "barrier",
    "monitored_barrier",
    "offload",
    "reload",
)
HOST_KINDS = frozenset({"offload", "reload"})


def register_namespace(name: str) -> None:
    """Have operators of a namespace count as launches and waits, by the kinds at the start of
    their names.
    """
    _namespaces.add(name)
    _roles.clear()


def _op(node: fx.Node) -> torch._ops.OpOverload | None:
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target
    return None


def is_wait(node: fx.Node) -> bool:
    """Return whether ``node`` is a ``wait_tensor``."""
    return role(node) == "wait"


def is_wait_operator(op: torch._ops.OpOverload) -> bool:
    """Return whether an operator is a ``wait_tensor``."""
    return op.namespace in _namespaces and op._opname.startswith("wait_tensor")


def is_launch(node: fx.Node) -> bool:
    """Return whether ``node`` starts a collective that a ``wait_tensor`` ends."""
    return role(node) == "launch"


def kind(node: fx.Node) -> str:
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``broadcast`` ...; ""
    if none.
    """
    op = _op(node)
    if op is None or op.namespace not in _namespaces:
        return ""
    return next((k for k in KINDS if op._opname.startswith(k)), "")


def launches(graph: fx.Graph) -> list[fx.Node]:
    """Every launch, in graph order."""
    return [node for node in graph.nodes if is_launch(node)]


def signature(launch: fx.Node) -> object:
    """Equal for launches that bring the same: nodes compare by identity, everything else by
    text.
    """
    return launch.target, launch.args[0], str(launch.args[1:]), str(launch.kwargs)


def waits_of(launch: fx.Node) -> list[fx.Node]:
    """The waits of a launch, through the ``getitem`` of a coalesced one, in user order."""
    found = []
    for user in launch.users:
        if is_wait(user):
            found.append(user)
        elif user.target is operator.getitem:
            found.extend(u for u in user.users if is_wait(u))
    return found


def loose_users(launch: fx.Node) -> list[fx.Node]:
    """Users that read the value of a launch without a wait between (a ``getitem`` is looked
    through).
    """
    found: list[fx.Node] = []
    for user in launch.users:
        if is_wait(user):
            continue
        if user.op == "call_function" and user.target is operator.getitem:
            found.extend(u for u in user.users if not is_wait(u))
        elif user.target is torch.ops.aten.sym_size.int:
            continue  # what it brings is known before it is there
        else:
            found.append(user)
    return found


def launch_of(wait: fx.Node) -> fx.Node | None:
    """The launch a wait belongs to; None if the value was launched outside this graph."""
    source = wait.args[0]
    if isinstance(source, fx.Node) and source.target is operator.getitem:
        source = source.args[0]
    return source if isinstance(source, fx.Node) and is_launch(source) else None


def argument(node: fx.Node, name: str) -> object:
    """The value of a named argument of the launch's schema, or None if the op has no such
    argument.
    """
    op = _op(node)
    if op is None:
        return None
    for index, arg in enumerate(op._schema.arguments):
        if arg.name == name:
            if name in node.kwargs:
                return node.kwargs[name]
            return node.args[index] if index < len(node.args) else arg.default_value
    return None


def group_name(node: fx.Node) -> str:
    """The process group's name. Under compile-on-one-rank the group is a node: its name stands
    in.
    """
    group = argument(node, "group_name")
    if group is None:
        group = argument(node, "tag")
    return group.name if isinstance(group, fx.Node) else str(group)


def group_size(node: fx.Node) -> int:
    """Ranks in the group; 0 if neither the op nor torch.distributed knows."""
    size = argument(node, "group_size")
    if isinstance(size, int):
        return size
    return group_size_of(group_name(node))


def reduce_op(node: fx.Node) -> str | None:
    """``sum``, ``avg``, ``max`` ... or None for a collective that does not reduce."""
    op = argument(node, "reduce_op")
    return None if op is None else str(op).lower()


def sent_by(launch: fx.Node) -> list[fx.Node]:
    """The tensors that a launch reads, without sizes of an exchange that nodes make."""
    return [
        node for node in launch.all_input_nodes if isinstance(node.meta.get("val"), torch.Tensor)
    ]


def input_tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """Fake tensors that the launch reads: one, or several if coalesced. Shapes are local."""
    for source in sent_by(node):
        yield source.meta["val"]


def dtype_name(launch: fx.Node) -> str:
    """The type of the first tensor that a launch reads, as text; "" if it reads none."""
    first = next(input_tensors(launch), None)
    return "" if first is None else str(first.dtype).removeprefix("torch.")


def payload_bytes(node: fx.Node) -> int:
    """Bytes of this rank's input; symbolic sizes by their hint."""
    return sum(payloads(node))


def payloads(node: fx.Node) -> list[int]:
    """Bytes of each launch in the call: one, or several if it is coalesced."""
    sizes = [tensor_bytes(tensor) for tensor in input_tensors(node)]
    return sizes if is_coalesced(node) else [sum(sizes)]


def is_coalesced(node: fx.Node) -> bool:
    """Return whether one call launches several collectives, each of one tensor."""
    op = _op(node)
    return op is not None and "coalesced" in op._opname


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of one tensor; symbolic sizes by their hint."""
    return math.prod(size_hint(size) for size in tensor.shape) * tensor.dtype.itemsize


def output_bytes(node: fx.Node) -> int:
    """Bytes of what a node makes on this rank, of several tensors all; symbolic sizes by their
    hint.
    """
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else (value,)
    return sum(tensor_bytes(t) for t in tensors if isinstance(t, torch.Tensor))


def released_bytes(node: fx.Node) -> int:
    """Bytes of an input whose memory a call gives back, until what it returns is read last."""
    op = _op(node)
    if op is None or op.namespace != HOST_NAMESPACE or op._opname != "release":
        return 0
    return tensor_bytes(next(input_tensors(node)))


def is_of_host_copy(node: fx.Node) -> bool:
    """Return whether a call copies a value to the host's memory or back, or stands beside that."""
    op = _op(node)
    return op is not None and op.namespace == HOST_NAMESPACE


# Collectives that return only when they are done: no wait follows, the compute stream stands still.
_BLOCKING_KINDS = {"_dtensor::shard_dim_alltoall": "all_to_all"}


def blocking_kind(node: fx.Node) -> str:
    """Kind of a collective that has no ``wait_tensor`` of its own; "" for every other node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return _BLOCKING_KINDS.get(node.target._schema.name, "")


Role = Literal["", "launch", "wait", "blocking"]
_roles: dict[int, tuple[object, Role]] = {}


def role(node: fx.Node) -> Role:
    """Tell what a node does to the timeline: starts a collective, waits for one, is one, or none
    of these.
    """
    if node.op != "call_function":
        return ""
    entry = _roles.get(id(node.target))
    if entry is None:
        op = _op(node)
        found: Role = "wait" if op is not None and is_wait_operator(op) else ""
        found = "blocking" if blocking_kind(node) else found or ("launch" if kind(node) else "")
        # A fact of the operator, so remembered for it; see ``aliasing.per_operator``.
        entry = _roles[id(node.target)] = (node.target, found)
    return entry[1]


def expect_even_exchanges(graph: fx.Graph) -> None:
    """Expect of each all_to_all whose sizes are symbols that it sends every rank an equal share,
    and gets as much of each.

    Prices of all that is made of its rows follow from that. It is read from the graph alone, so
    ranks expect the same.
    """
    target = torch.ops._c10d_functional.all_to_all_single.default
    for launch in graph.find_nodes(op="call_function", target=target):
        source, ranks = launch.args[0], group_size(launch)
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.dim() or ranks < 1:
            continue
        share = max(1, size_hint(value.shape[0]) // ranks)
        for name in ("input_split_sizes", "output_split_sizes"):
            sizes = argument(launch, name)
            for size in sizes if isinstance(sizes, (list, tuple)) else ():
                if isinstance(size, fx.Node):
                    expect(size.meta.get("val"), share)
