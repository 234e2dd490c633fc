"""Programs to check: the entries of torch's operator database, with sizes that shard evenly or
not.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

EVEN = {"L": 24, "M": 12, "S": 4, "XS": 2}
UNEVEN = {"L": 20, "M": 10, "S": 5, "XS": 3}


@dataclass(frozen=True)
class Sample:
    """One call: ``function(*args, **kwargs)``, global tensors among the leaves."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def operators() -> dict[str, Any]:
    """Every entry of ``op_db`` by its full name, in the order of the database."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {op.formatted_name: op for op in op_db}


def set_sizes(sizes: dict[str, int]) -> None:
    """Make the database draw its samples with these sizes."""
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing._internal"):
            for size, value in sizes.items():
                if isinstance(getattr(module, size, None), int):
                    setattr(module, size, value)


def samples(op: Any, limit: int) -> list[Sample]:
    """Up to ``limit`` samples of an entry in double precision if it can, first those unlike each
    other.

    Samples are alike when they differ in the sizes and values of tensors alone: one with another
    reduction, mode, dimension or number of dimensions is another program.
    """
    supported = op.supported_dtypes("cpu")
    preferred = [torch.float64, torch.float32, torch.int64, *sorted(supported, key=str)]
    if not supported:
        return []  # an operator of another kind of device
    dtype = next(d for d in preferred if d in supported)
    try:
        drawn = _draw(op, dtype)
    except (IndexError, RuntimeError):
        # A few entries are written for the database's own sizes.
        set_sizes(UNEVEN)
        drawn = _draw(op, dtype)
    rounds: dict[str, list[Sample]] = {}
    for sample in drawn:
        rounds.setdefault(_kind(sample), []).append(sample)
    groups = list(rounds.values())
    if len(groups) >= limit:
        return [groups[i * len(groups) // limit][0] for i in range(limit)]
    by_turn = itertools.chain.from_iterable(itertools.zip_longest(*groups))
    return list(itertools.islice((s for s in by_turn if s is not None), limit))


def _draw(op: Any, dtype: torch.dtype) -> list[Sample]:
    torch.manual_seed(0)
    return [
        Sample(op.op, (s.input, *s.args), dict(s.kwargs))
        for s in op.sample_inputs("cpu", dtype, requires_grad=False)
    ]


def _kind(sample: Sample) -> str:
    return repr(
        pytree.tree_map_only(
            torch.Tensor, lambda t: (t.dtype, t.ndim), (sample.args, sample.kwargs)
        )
    )


def tensors(sample: Sample) -> list[torch.Tensor]:
    """The tensors among the arguments, in the order in which placements are listed."""
    leaves = pytree.tree_leaves((sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
