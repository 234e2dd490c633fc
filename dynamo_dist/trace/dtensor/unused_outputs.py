"""Backward through some of a graph's DTensor outputs: those that no loss uses get gradients of zeros.

Autograd makes them itself, as plain tensors of the global shape, which AOTAutograd refuses where the
backward was traced with a DTensor. A hook before the backward's node sees which gradients are absent;
AOTAutograd then gets local zeros in their place, without communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.torch_compat import aot_runtime as outputs_compat
from dynamo_dist.torch_compat.patching import Change


class _Absent(threading.local):
    """The makers of the zeros for the absent gradients of the backward that runs in this thread, in order."""

    makers: Sequence[Callable[[], DTensor]] = ()


_absent = _Absent()


def _watched(forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` with hooks on the node of its outputs."""

    def call(*args: Any) -> Any:
        outputs = forward(*args)
        if torch.is_grad_enabled():
            _watch(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
        return outputs

    return call


def _watch(outputs: Sequence[Any]) -> None:
    made = [o for o in outputs if isinstance(o, DTensor) and o.grad_fn is not None]
    if not made:
        return
    makers = {o.output_nr: _zeros_like(o) for o in made}

    def before(grads: tuple[torch.Tensor | None, ...]) -> None:
        _absent.makers = [makers[i] for i, grad in enumerate(grads) if grad is None and i in makers]

    def after(*_: object) -> None:
        _absent.makers = ()

    node: Any = made[0].grad_fn
    node.register_prehook(before)
    node.register_hook(after)


def _zeros_like(output: DTensor) -> Callable[[], DTensor]:
    """Makes the gradient, without holding the output. A partial output's gradient is whole on each rank."""
    mesh, shape, stride = output.device_mesh, output.shape, output.stride()
    size, dtype, device = output._local_tensor.shape, output.dtype, output.device
    placements = [Replicate() if p.is_partial() else p for p in output.placements]

    def make() -> DTensor:
        zeros = torch.zeros(size, dtype=dtype, device=device)
        return DTensor.from_local(
            zeros, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return make


def _absent_gradient(tangent: torch.Tensor, expected: Any) -> torch.Tensor | None:
    """Zeros as the backward was traced with, for a plain tensor that stands for an absent gradient."""
    zeros = [make() for make in _absent.makers]
    alike = [zero for zero in zeros if zero.shape == tangent.shape and zero.dtype == tangent.dtype]
    alike.sort(key=lambda zero: zero.__tensor_flatten__()[1] != expected)
    return alike[0] if alike else None


def unused_outputs_changes() -> list[Change]:
    """List the changes that enabling makes for outputs that no loss uses."""
    return [
        *outputs_compat.on_forward_with_tangents(DTensor, _watched),
        *outputs_compat.on_plain_tangent(DTensor, _absent_gradient),
    ]
