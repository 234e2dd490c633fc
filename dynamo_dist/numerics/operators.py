"""Every operator that runs on DTensors against the same operator on whole tensors."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import dynamo_dist
from dynamo_dist.numerics.differences import (
    difference_from_one_device,
    same_on_all_ranks,
    tolerance_of,
)
from dynamo_dist.numerics.ranks import LayoutError, whole_tensor
from dynamo_dist.torch_compat import dtensor_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

_NOT_THE_USERS = tuple(
    str(Path(root).parent) + "/" for root in (torch.__file__, dynamo_dist.__file__)
)


@dataclass(frozen=True, slots=True)
class Checked:
    """One operator in one layout. ``problem`` is empty if it computed what one device computes."""

    op: str
    layout: str
    problem: str
    line: str


@dataclass
class Operators(TorchDispatchMode):
    """While active, checks each operator on DTensors, once for each layout, shape and argument.

    The whole tensors are joined from what the ranks hold before the call, so that an error of one
    operator is not charged to those after it. ``checked`` lists what was seen, in order.
    """

    checked: list[Checked] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        leaves = pytree.tree_leaves((args, kwargs))
        distributed = [leaf for leaf in leaves if isinstance(leaf, DTensor)]
        if not distributed or torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        key = f"{func} {pytree.tree_map_only(torch.Tensor, _describe, (args, kwargs))}"
        if key in self._seen:
            return func(*args, **kwargs)
        self._seen.add(key)
        layout = " ".join(str(leaf.placements) for leaf in distributed)
        try:
            whole_args, whole_kwargs = pytree.tree_map_only(torch.Tensor, _whole, (args, kwargs))
        except LayoutError as error:
            self._record(func, layout, f"an argument is broken already: {error}")
            return func(*args, **kwargs)
        results = func(*args, **kwargs)
        with dtensor_ranks.one_device():
            expected = func(*whole_args, **whole_kwargs)
        if "empty" not in func._schema.name:
            found, wanted = pytree.tree_leaves(results), pytree.tree_leaves(expected)
            allowed = tolerance_of(*wanted, *pytree.tree_leaves((whole_args, whole_kwargs)))
            problems = [
                difference_from_one_device(a, b, tolerance=allowed)
                for a, b in zip(found, wanted, strict=False)
            ]
            self._record(func, layout, next((p for p in problems if p), ""))
        return results

    def _record(self, func: Callable[..., object], layout: str, problem: str) -> None:
        self.checked.append(Checked(str(func), layout, problem, _line()))


def _describe(tensor: torch.Tensor) -> str:
    placements = tensor.placements if isinstance(tensor, DTensor) else ""
    return f"{tuple(tensor.shape)} {tensor.dtype} {placements}"


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    # Memory that is about to be filled differs from rank to rank, and may.
    whole = (
        whole_tensor(tensor, False) if isinstance(tensor, DTensor) else same_on_all_ranks(tensor)
    )
    return whole.detach().clone()


def _line() -> str:
    """The innermost line that is neither torch's nor ours; empty in a backward pass."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_NOT_THE_USERS):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""
