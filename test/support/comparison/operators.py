"""Every higher-order operator of torch's own database, forward and backward, by each way to
compile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from comparison.outcome import End, Unfit, compare, numbers
from torch.utils import _pytree as pytree

BACKENDS = ("eager", "aot_eager", "lowered")
SAMPLES = 2


def _database() -> dict[str, Any]:
    from torch.testing._internal.hop_db import hop_db

    return {f"{op.name}.{op.variant_test_name or 'plain'}": op for op in hop_db}


def names(part: str) -> list[str]:
    """An operator with each backend, and whether gradients are asked for."""
    return [
        f"{name}-{backend}-{way}"
        for name in _database()
        for backend in BACKENDS
        for way in ("forward", "backward")
    ]


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Runs an operator's samples."""
    from comparison._torch import no_kernels

    known = _database()

    def run(program: str) -> End:
        name, backend, way = program.rsplit("-", 2)
        op = known[name]
        inductor = "inductor" if side == "upstream" else "dynamo_dist"
        used = inductor if backend == "lowered" else backend
        around = no_kernels() if backend == "lowered" else contextlib.nullcontext()
        seen: list[Any] = []
        with around:
            for at in range(SAMPLES):
                torch._dynamo.reset()
                call = torch.compile(_fresh(op.op), backend=used, fullgraph=True)
                given = _sample(op, at, way == "backward")
                if given is None:
                    break
                found = _step(call, *given, backward=way == "backward")
                try:
                    expected = _step(
                        op.op, *_sample(op, at, way == "backward"), backward=way == "backward"
                    )
                except Unfit:
                    raise
                except Exception:
                    seen += [found]  # no eager mode: the other side is the reference
                    continue
                if problem := compare(found, expected, f"sample {at}"):
                    return End("wrong", problem)
        return End("right", "", numbers(seen))

    return run


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _sample(op: Any, at: int, grad: bool) -> tuple[Any, Any] | None:
    torch.manual_seed(at)
    for number, sample in enumerate(op.sample_inputs("cpu", torch.float32, requires_grad=grad)):
        if number == at:
            return (sample.input, *sample.args), dict(sample.kwargs)
    return None


def _step(function: Callable[..., Any], args: Any, kwargs: Any, backward: bool) -> Any:
    torch.manual_seed(7)
    out = function(*args, **kwargs)
    leaves = [
        t
        for t in pytree.tree_leaves((args, kwargs))
        if isinstance(t, torch.Tensor) and t.requires_grad
    ]
    gradients: list[Any] = []
    if backward:
        ends = [
            t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        if not ends:
            raise Unfit("nothing to differentiate")
        gradients = list(
            torch.autograd.grad([t.sin().sum() for t in ends], leaves, allow_unused=True)
        )
    return [out, gradients, leaves]
