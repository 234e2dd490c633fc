"""One call on DTensors against the same call on one device, forward and backward."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from comparison.strategies.layouts import Layout
from comparison.strategies.samples import Sample
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dynamo_dist.numerics.differences import difference_from_one_device, tolerance_of
from dynamo_dist.numerics.ranks import split
from dynamo_dist.numerics.verification import Operators

# Worst first: the verdict over an operator is the first that any of its cases has.
OUTCOMES = (
    "wrong",
    "wrong backward",
    "error",
    "no strategy",
    "error backward",
    "no strategy backward",
    "error compiled",
    "ok",
)
REPETITIONS = 50
NO_STRATEGY = "does not have a sharding strategy registered"


@dataclass(frozen=True)
class Expected:
    """What one device computes: outputs, their cotangents, and gradients of the float inputs."""

    outputs: list[Any]
    cotangents: list[torch.Tensor | None]
    gradients: list[torch.Tensor | None]
    random: bool
    tolerance: float


@dataclass(frozen=True)
class Outcome:
    """One of ``OUTCOMES`` and, unless ok, what was seen."""

    kind: str
    detail: str = ""


class _Draws(TorchDispatchMode):
    """Notices operators that draw random numbers: of those only the shapes can be compared."""

    seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen = True
        return func(*args, **(kwargs or {}))


def expected(sample: Sample, differentiable: bool, filled: bool = True) -> Expected | None:
    """None if one device cannot compute it either. Not ``filled``: the memory is as it was
    found.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _Draws() as draws:
                outputs, leaves = _call(
                    sample,
                    lambda t: t.detach().clone().requires_grad_(_wants_gradient(t, differentiable)),
                )
    except Exception:
        return None
    generator = torch.Generator().manual_seed(2)
    cotangents = [_cotangent(out, generator) for out in outputs]
    try:
        gradients = _gradients(outputs, leaves, cotangents)
    except Exception:
        cotangents, gradients = [None] * len(outputs), [None] * len(leaves)
    detached = [o.detach() if isinstance(o, torch.Tensor) else o for o in outputs]
    return Expected(
        detached, cotangents, gradients, draws.seen or not filled, tolerance_of(*leaves, *outputs)
    )


def check(
    sample: Sample, reference: Expected, mesh: DeviceMesh, layout: Layout, differentiable: bool
) -> Outcome:
    """Run the call with its tensors laid out so, on all ranks of ``mesh``; names the operator to
    blame.
    """
    outcome = _check(sample, reference, mesh, layout, differentiable)
    if outcome.kind.startswith("wrong") and not _repeats(sample):
        # A library whose last bits depend on where its memory lies; ranks cannot be held to more.
        outcome = _check(sample, reference, mesh, layout, differentiable, same_replicas=False)
    if not outcome.kind.startswith("wrong"):
        return outcome
    operators = Operators()
    with contextlib.suppress(Exception), operators:
        _check(sample, reference, mesh, layout, differentiable)
    first = next((each for each in operators.checked if each.problem), None)
    blamed = f"; first {first.op} on {first.layout}: {first.problem}" if first else ""
    return Outcome(outcome.kind, outcome.detail + blamed)


def _repeats(sample: Sample) -> bool:
    """Whether one device computes the same bits every time."""
    runs = [_call(sample, lambda t: t.detach().clone())[0] for _ in range(REPETITIONS)]
    return all(
        bool(((one == other) | (one != one)).all())  # a NaN is as good as another
        for run in runs
        for one, other in zip(runs[0], run, strict=True)
        if isinstance(one, torch.Tensor)
    )


def _check(
    sample: Sample,
    reference: Expected,
    mesh: DeviceMesh,
    layout: Layout,
    differentiable: bool,
    same_replicas: bool = True,
) -> Outcome:
    placements = iter(layout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            outputs, leaves = _call(
                sample,
                lambda t: split(t, mesh, next(placements), _wants_gradient(t, differentiable)),
            )
        except Exception as error:
            return _failure(error, "")
        if problem := _compare(outputs, reference.outputs, reference, same_replicas):
            return Outcome("wrong", problem)
        if all(c is None for c in reference.cotangents) or reference.random:
            return Outcome("ok")
        try:
            cotangents = [
                None if c is None or not isinstance(out, DTensor) else _split_like(c, out)
                for out, c in zip(outputs, reference.cotangents, strict=True)
            ]
            gradients = _gradients(outputs, leaves, cotangents)
        except Exception as error:
            return _failure(error, " backward")
        if problem := _compare(gradients, reference.gradients, reference, same_replicas):
            return Outcome("wrong backward", problem)
    return Outcome("ok")


def _call(
    sample: Sample, leaf: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[list[Any], list[torch.Tensor]]:
    args, kwargs = pytree.tree_map_only(torch.Tensor, leaf, (sample.args, sample.kwargs))
    leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    try:
        outputs = sample.function(*args, **kwargs)
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        # The operator writes to its input: let it write to a copy.
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        outputs = sample.function(*args, **kwargs)
    return pytree.tree_leaves(outputs), leaves


def _wants_gradient(tensor: torch.Tensor, differentiable: bool) -> bool:
    return differentiable and (tensor.is_floating_point() or tensor.is_complex())


def _gradients(
    outputs: Sequence[Any], leaves: Sequence[torch.Tensor], cotangents: Sequence[Any]
) -> list[torch.Tensor | None]:
    pairs = [
        (out, c)
        for out, c in zip(outputs, cotangents, strict=True)
        if c is not None and isinstance(out, torch.Tensor) and out.requires_grad
    ]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs], wanted, [c for _, c in pairs], allow_unused=True
        )
    )
    return [next(found) if leaf.requires_grad else None for leaf in leaves]


def _cotangent(out: Any, generator: torch.Generator) -> torch.Tensor | None:
    if not isinstance(out, torch.Tensor) or not out.requires_grad:
        return None
    return torch.randn(out.shape, dtype=out.dtype, generator=generator)


def _split_like(cotangent: torch.Tensor, out: DTensor) -> DTensor:
    kinds = {type(placement) for placement in out.placements}
    placements = [Replicate() if isinstance(p, Partial) else p for p in out.placements]
    if not kinds <= {Shard, Replicate, Partial}:
        placements = [Replicate()] * len(placements)
    return split(cotangent, out.device_mesh, placements)


def _compare(
    found: Sequence[Any], wanted: Sequence[Any], reference: Expected, same_replicas: bool
) -> str:
    """What differs, or nothing."""
    if len(found) != len(wanted):
        return f"{len(found)} results, expected {len(wanted)}"
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if problem := difference_from_one_device(
            one, other, not reference.random, reference.tolerance, same_replicas
        ):
            return f"result {at}: {problem}"
    return ""


def _failure(error: Exception, where: str) -> Outcome:
    text = " ".join(str(error).split())
    kind = "no strategy" if NO_STRATEGY in text else "error"
    return Outcome(kind + where, f"{type(error).__name__}: {text[:400]}")
