"""Rows of docs/reference/dtensor-in-graphs.md: is a program one graph, with eager mode's numbers on every
rank?
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from comparison.in_graphs import _torch
from comparison.outcome import End, compare
from comparison.program import mesh_on_cpu
from comparison.row import Row, known
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

# Whose eager mode is asked for the truth, one after the other, by what a row says.
STATES = {"eager": ("eager", "plugin"), "plugin": ("plugin",), "none": ()}
# Of this machine alone: where files are, addresses.
_PLACES = re.compile(
    rf"{re.escape(str(Path(__file__).parents[3]))}/|[^\s'\"(]*site-packages/|[^\s'\"(]*/lib/python[\d.]+/| at 0x[0-9a-f]+"
)


def names(part: str) -> list[str]:
    """Every row."""
    return list(known())


def mesh_of(part: str, name: str) -> tuple[int, ...]:
    """The sizes of a row's mesh."""
    return known()[name].sizes


def on_rank(part: str, name: str, side: str, rank: int) -> End:
    """Run a row in eager mode without the plugin, or with it where it raises so, and compiled;
    compare on this rank.
    """
    import dynamo_dist

    row = known()[name]
    truth, right, why = "none", None, ""
    for state in STATES[row.truth]:
        dynamo_dist.enable() if state == "plugin" else dynamo_dist.disable()
        _torch.forget()  # what eager mode compiles for itself, too
        found, error = _values_of(row, rank, None)
        # All ranks take the same values for the truth.
        failed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(failed, error is not None)
        if not any(failed):
            truth, right = state, found
            break
    dynamo_dist.enable() if side == "ours" else dynamo_dist.disable()
    _torch.forget()
    with _torch.graphs_and_breaks() as seen:
        found, error = _values_of(row, rank, side)
    if error is not None:
        refuses = right is None or _torch.is_refusal(error)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = _short(f"{type(error).__name__}: {' '.join(lines[:3])[:400]}")
        return End("refuses" if refuses else "error", why, truth=truth)
    if right is not None and (problem := compare(found, right, f"rank {rank}, value")):
        return End("wrong", problem[:300], truth=truth)
    if seen["breaks"]:
        return End("breaks", _PLACES.sub("", sorted(seen["breaks"])[0])[:1200], truth=truth)
    if not seen["graphs"]:
        return End("breaks", "no graph was compiled", truth=truth)
    return End("right", truth=truth)


def _short(text: str) -> str:
    """On one line, without what is of this machine alone."""
    text = re.sub(r"127\.0\.0\.1\]?:\d+", "127.0.0.1", _PLACES.sub("", " ".join(text.split())))
    return text[:300]


def _values_of(row: Row, rank: int, side: str | None) -> tuple[list[Any], BaseException | None]:
    """What the row gives compiled by a side, or in eager mode; and the error that ends it."""
    found: list[Any] = []
    printed = io.StringIO()
    try:
        # A new one: what the plugin knows of meshes is of those made since it was enabled.
        mesh = mesh_on_cpu(row.sizes)
        torch.manual_seed(0)
        program, calls = row.build(mesh, rank)
        function, step = program if isinstance(program, tuple) else (program, None)
        with contextlib.redirect_stdout(printed), _torch.quick_lowering():
            call = function if side is None else _compiled(row, side, function)
            for args in calls if isinstance(calls, list) else [calls]:
                leaves = _gathered(step(call, *args) if step else call(*args))
                if row.trained:
                    _train(leaves)
                found.append(_values(leaves))
            found.append(_values(_state(function, calls)))
    except BaseException as error:
        if side is not None:
            traceback.print_exc()
        return found, error
    return [*found, printed.getvalue()], None


def _compiled(row: Row, side: str, function: Any) -> Any:
    lowered = "inductor" if side == "upstream" else "dynamo_dist"
    backend = lowered if row.backend == "lowered" else "aot_eager"
    return torch.compile(function, backend=backend, dynamic=row.dynamic)


def _whole(value: DTensor) -> torch.Tensor:
    """The full tensor; this rank's part where ranks hold others than a shape says, or are told
    other shapes.
    """
    local = value._local_tensor
    if hasattr(local, "whole"):
        return local.whole()  # type: ignore[no-any-return]
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, (_is_as_chunk(value), tuple(value.shape)))
    return value.full_tensor() if flags[0][0] and len(set(flags)) == 1 else local


def _is_as_chunk(value: DTensor) -> bool:
    shape = _torch.local_shape(value)
    return shape is None or tuple(shape) == tuple(value._local_tensor.shape)


def _gathered(out: Any) -> list[Any]:
    """Leaves of what a call gave, each with its class; a DTensor is made whole once, for its
    numbers and its gradient.
    """
    found: list[Any] = []
    for each in pytree.tree_leaves(out):
        if isinstance(each, DTensor):
            found += [type(each).__name__, _whole(each)]
        else:
            found += _values([each], detach=False)
    return found


def _train(leaves: list[Any]) -> None:
    losses = [
        (
            each * torch.linspace(0.5, 1.5, max(each.numel(), 1))[: each.numel()].view(each.shape)
        ).sum()
        for each in leaves
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def _state(function: Any, calls: Any) -> list[Any]:
    """Arguments and parameters behind the calls, and their gradients."""
    leaves: list[Any] = []
    for each in pytree.tree_leaves([function, calls]):
        if isinstance(each, nn.Module):
            leaves += [*each.parameters(), *each.buffers()]
        elif not callable(each):
            leaves.append(each)
    grads = [each.grad for each in leaves if isinstance(each, torch.Tensor) and each.is_leaf]
    return [leaves, grads]


def _values(tree: Any, *, detach: bool = True) -> list[Any]:
    """Leaves as plain tensors and values; of a tensor also its class."""
    found: list[Any] = []
    for each in pytree.tree_leaves(tree):
        if isinstance(each, DTensor):
            found += [type(each).__name__, _whole(each).detach().clone()]
        elif isinstance(each, torch.Tensor):
            whole = each.whole() if hasattr(each, "whole") else each  # type: ignore[attr-defined]
            kind = "Tensor" if type(each) is not nn.Parameter else "Parameter"
            found += [kind, whole.detach().clone() if detach else whole]
        elif isinstance(each, float) and math.isfinite(each):
            found.append(torch.tensor(each))
        else:
            found.append(each if isinstance(each, (int, str, bool, type(None))) else repr(each))
    return found
