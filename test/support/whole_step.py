"""A user's training step, run eagerly and as one compiled graph, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from inductor_passes.inductor.session import graph_passes_only

Step = Callable[[Any], Any]


class Gated(nn.Module):
    """A gated MLP beside its input: activations are cheap to compute again from two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def network(bias: bool = True) -> nn.Module:
    """A small network in float64, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=bias), nn.Tanh(), nn.Linear(8, 8, bias=bias)).double()


def batches(count: int = 5) -> list[torch.Tensor]:
    """Batches for it, the same each time."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(count)]


def plain_step(model: nn.Module, optimizer: Any) -> Step:
    """The step that everybody writes."""

    def step(x: Any) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def closure_step(model: nn.Module, optimizer: Any) -> Step:
    """The same with a closure, which the optimizer calls as often as it wants."""

    def step(x: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    return step


def compare(
    build: Callable[[], tuple[Any, ...]],
    inputs: Sequence[Any] | None = None,
    *,
    graphs: int | None = 1,
    fullgraph: bool = True,
    tolerance: float = 1e-6,
    options: dict[str, Any] | None = None,
) -> None:
    """Run ``build()``'s step eagerly and compiled, and compare results, values and graphs.

    ``build()`` gives the tensors that the step changes, the step, and perhaps what is called behind
    each step outside of it. ``graphs``: how many are compiled for all inputs together; None for any
    number.
    """
    inputs = batches() if inputs is None else inputs
    values, step, *behind = build()
    want = [_run(step, x, behind) for x in inputs]
    ours, changed, *behind = build()
    counters.clear()
    torch.compiler.reset()
    # What Inductor generates from the graph is its own; its patterns are not.
    with graph_passes_only():
        compiled = torch.compile(
            changed, backend="dynamo_dist", fullgraph=fullgraph, options=options
        )
        found = [_run(compiled, x, behind) for x in inputs]
    torch.testing.assert_close(found, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close([*ours], [*values], rtol=tolerance, atol=tolerance)
    assert graphs is None or counters["stats"]["unique_graphs"] == graphs


def _run(step: Step, x: Any, behind: Iterable[Callable[[], None]]) -> Any:
    result = step(x)
    for call in behind:
        call()
    return result
