"""What this process launches, seen at the dispatcher: eager, compiled, and autograd's, alike.

Private names seen in torch 2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

# The operators of c10d by what they do, however their results are laid out. Longest names first.
_KINDS = (
    ("_reduce_scatter_base_", "reduce_scatter"),
    ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    ("reduce_scatter_", "reduce_scatter"),
    ("_allgather_base_", "all_gather"),
    ("allgather_into_tensor_coalesced_", "all_gather"),
    ("allgather_coalesced_", "all_gather"),
    ("allgather_", "all_gather"),
    ("allreduce_coalesced_", "all_reduce"),
    ("allreduce_", "all_reduce"),
    ("alltoall_base_", "all_to_all"),
    ("alltoall_", "all_to_all"),
    ("broadcast_", "broadcast"),
    ("scatter_", "scatter"),
    ("gather_", "gather"),
    ("reduce_", "reduce"),
    ("barrier", "barrier"),
)
# Where each has what this rank gives.
_GIVEN = {
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "reduce_scatter_": 1,
    "_allgather_base_": 1,
    "allgather_into_tensor_coalesced_": 1,
    "allgather_coalesced_": 1,
    "allgather_": 1,
    "alltoall_base_": 1,
    "alltoall_": 1,
}


@dataclass(frozen=True, slots=True)
class Launch:
    """``parts``: numbers of elements and dtypes that this rank gives, one for each tensor."""

    group: str
    kind: str
    parts: tuple[tuple[int, str], ...]

    def __str__(self) -> str:
        return f"{self.kind} of {', '.join(f'{n} {dtype}' for n, dtype in self.parts)}"


_seen: list[Launch] | None = None
_library: Any = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches of this process while the block runs."""
    global _seen  # noqa: PLW0603 - the dispatcher has one table for the process
    _install()
    before, mine = _seen, list[Launch]()
    _seen = mine
    try:
        yield mine
    finally:
        _seen = before


def _install() -> None:
    global _library  # noqa: PLW0603
    if _library is not None:
        return
    key = torch._C.DispatchKey.BackendSelect
    below = torch._C._dispatch_keyset_full_after(key)
    _library = torch.library.Library("c10d", "IMPL", "BackendSelect")
    for name, kind in _KINDS:
        packet = getattr(torch.ops.c10d, name, None)
        if packet is not None:
            _library.impl(name, _hook(packet.default, name, kind, below), with_keyset=True)


def _hook(op: Any, name: str, kind: str, below: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if _seen is not None:
            given = tree_leaves(args[_GIVEN.get(name, 0)])
            tensors = [each for each in given if isinstance(each, torch.Tensor)]
            parts = tuple((t.numel(), str(t.dtype).removeprefix("torch.")) for t in tensors)
            _seen.append(Launch(_group_name(args), kind, parts))
        return op.redispatch(keyset & below, *args, **kwargs)

    return kernel


def _group_name(args: Sequence[Any]) -> str:
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg.group_name
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).group_name
    return ""


def by_group(launches: Sequence[Launch]) -> dict[str, list[Launch]]:
    """Launches of each group, in order; barriers left out."""
    found: dict[str, list[Launch]] = {}
    for launch in launches:
        if launch.kind != "barrier":
            found.setdefault(launch.group, []).append(launch)
    return found


def first_difference(ranks: Sequence[dict[str, list[Launch]]]) -> str:
    """Where ranks launch something else on a group they share, in words; "" where all match."""
    for name in sorted({name for rank in ranks for name in rank}):
        members = [(at, rank[name]) for at, rank in enumerate(ranks) if name in rank]
        (first, theirs), *others = members
        for at, mine in others:
            if mine != theirs:
                number = next(
                    (i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b),
                    min(len(theirs), len(mine)),
                )
                one, other = (
                    str(each[number]) if number < len(each) else "nothing"
                    for each in (theirs, mine)
                )
                return (
                    f"group {name}, launch {number}: rank {first} {one}; rank {at} {other}"
                    f" ({len(theirs)} and {len(mine)} in all)"
                )
    return ""
