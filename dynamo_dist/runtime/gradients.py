"""Gradients of a compiled graph, added straight into the local tensors of the parameters' ``.grad``.

Stock wraps each gradient as a DTensor, and autograd then adds it to ``.grad`` by a DTensor operation of
its own. Here backward adds all of them itself, at once and below DTensor, wherever nobody could tell
the difference. Where somebody could (a hook that is given the gradient, ``torch.autograd.grad``, other
placements, a tensor that is no leaf), the gradient goes the way it always went.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dynamo_dist._torch import Change
from dynamo_dist.runtime import _torch

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("direct_gradients", default=False)


def changes() -> list[Change]:
    """What to apply while the plugin is enabled; graphs compiled inside ``direct()`` gain by it."""
    return _torch.wrap_gradients(_make)


@contextlib.contextmanager
def direct(wanted: bool) -> Iterator[None]:
    """Whether graphs compiled in the block add their gradients themselves."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


def _make(stock: _torch.Wrap, layout: _torch.GradientLayout) -> _torch.Wrap:
    return torch.compiler.disable(Gradients(stock, layout).give) if _wanted.get() else stock


class _Known(NamedTuple):
    """What an output of the backward graph is, as long as mesh and parameter spec are the same."""

    mesh: object
    parameter_spec: object  # held, so that its identity is not given to another
    spec: Any
    requires_grad: bool
    fits: bool  # whether autograd would keep this gradient of that parameter as it is


class Gradients:
    """From what a backward graph returns to what its autograd node returns.

    ``stock`` is torch's function that does this.
    """

    def __init__(self, stock: _torch.Wrap, layout: _torch.GradientLayout) -> None:
        self.stock, self.layout = stock, layout
        self.known: dict[int, _Known] = {}
        # The leaves that had no hooks when the process had made this many.
        self.unhooked: tuple[list[int], int] = ([], -1)

    def give(self, outs: tuple[Any, ...]) -> tuple[Any, ...]:
        """``outs`` are local tensors; the result has DTensors, or None for what is added already."""
        node = _torch.current_node()
        if node is None or torch.is_grad_enabled() or torch.is_anomaly_enabled():
            return self.stock(outs)
        edges = iter([edge for edge, _ in node.next_functions if edge is not None])
        targets = [next(edges, None) if needs else None for needs in node.needs_input_grad]
        if len(targets) != self.layout.inputs:
            return self.stock(outs)
        leaves = self._plain_leaves(targets)
        result: list[Any] = [None] * len(targets)
        for position, index in self.layout.plain:
            result[position] = outs[index]
        grads, sums, addends = [], [], []
        taken = set[int]()  # one tensor may be the gradient of several parameters
        for out in self.layout.wrapped:
            local = outs[out.local]
            if local is None:
                continue
            if id(local) in taken:
                local = local.clone()
            taken.add(id(local))
            leaf = leaves[out.position]
            known = self._known(out, local, outs[out.mesh], leaf)
            if known.fits and _torch.will_run(targets[out.position]) and _in_order(local):
                grad = leaf.grad
                if grad is None:
                    leaf.grad = DTensor(local, known.spec, requires_grad=False)
                    continue
                if _takes(grad, known.spec) and id(grad._local_tensor) not in taken:
                    taken.add(id(grad._local_tensor))
                    grads.append(grad)
                    sums.append(grad._local_tensor)
                    addends.append(local)
                    continue
            result[out.position] = DTensor(local, known.spec, requires_grad=known.requires_grad)
        if sums:
            torch._foreach_add_(sums, addends)
            torch.autograd.graph.increment_version(grads)
        return tuple(result)

    def _plain_leaves(self, targets: Sequence[Any]) -> list[Any]:
        """The parameter that each target accumulates for; None where a hook is given the gradient."""
        leaves = [_torch.leaf_of(target) for target in targets]
        state = [id(leaf) for leaf in leaves], RemovableHandle.next_id
        # A leaf of which this was true at that count existed then: no other can have its id.
        if state != self.unhooked:
            hooked = [
                leaf is not None and _torch.has_hooks(t)
                for leaf, t in zip(leaves, targets, strict=True)
            ]
            if any(hooked):
                return [None if bad else leaf for leaf, bad in zip(leaves, hooked, strict=True)]
            self.unhooked = state
        return leaves

    def _known(self, out: _torch.WrappedGradient, local: Any, mesh: object, leaf: Any) -> _Known:
        spec = None if leaf is None else leaf._spec
        known = self.known.get(out.position)
        if known is None or known.mesh is not mesh or known.parameter_spec is not spec:
            made = out.unflatten(local, mesh)
            meta = made._spec.tensor_meta
            fits = (
                spec is not None
                and spec.tensor_meta == meta
                and not made.requires_grad
                and getattr(leaf, "grad_dtype", leaf.dtype) == leaf.dtype
            )
            known = _Known(mesh, spec, made._spec, made.requires_grad, fits)
            self.known[out.position] = known
        return known


def _takes(grad: Any, spec: Any) -> bool:
    """Whether adding a gradient of this ``spec`` to ``grad`` is adding their local tensors."""
    return (
        type(grad) is DTensor
        and (grad._spec is spec or grad._spec == spec)
        and type(grad._local_tensor) is torch.Tensor
        and not grad.requires_grad
    )


def _in_order(local: torch.Tensor) -> bool:
    """Whether work queued now is seen by whoever reads ``.grad`` after backward.

    Autograd waits for the streams of its accumulators, which may not be the stream of this node.
    """
    if local.is_cuda:
        return torch.cuda.current_stream(local.device) == torch.cuda.default_stream(local.device)
    return local.is_cpu
