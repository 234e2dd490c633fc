"""A feature: a function that yields what was found and what is right, compiled in the way it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Pairs = Iterator[tuple[Any, Any]]
FEATURES: dict[str, Feature] = {}
COMPILED = ("aot_eager", "lowered")


@dataclass(frozen=True, slots=True)
class Given:
    """How to compile, and which side this is."""

    backend: str
    side: str

    def compiled(self, function: Any, **options: Any) -> Any:
        """As a user compiles: one graph, unless said otherwise."""
        return torch.compile(function, backend=self.backend, **{"fullgraph": True, **options})


@dataclass(frozen=True, slots=True)
class Feature:
    """What runs, and for which backends."""

    run: Callable[[Given], Pairs]
    backends: tuple[str, ...]


def feature(*backends: str) -> Callable[[Callable[[Given], Pairs]], Callable[[Given], Pairs]]:
    """Register under the function's name; by default for ``aot_eager`` and for Inductor's lowering."""

    def register(run: Callable[[Given], Pairs]) -> Callable[[Given], Pairs]:
        FEATURES[run.__name__] = Feature(run, backends or COMPILED)
        return run

    return register


def draw(*shape: int, grad: bool = False, seed: int = 0, dtype: Any = torch.float32) -> Any:
    """The same numbers each time."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def trained(function: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Any]:
    """The outputs of a call and the gradients of its inputs."""
    given = [draw(*shape, grad=True, seed=at) for at, shape in enumerate(shapes)]
    torch.manual_seed(3)
    out = function(*given)
    outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if o.requires_grad]
    gradients = torch.autograd.grad([o.sin().sum() for o in outs], given, allow_unused=True)
    return [out, *gradients]


def trained_module(module: torch.nn.Module, call: Callable[..., Any], *given: Any) -> list[Any]:
    """The output of a call of ``module`` and the gradients of its parameters, which are set to None first."""
    module.zero_grad(set_to_none=True)
    torch.manual_seed(3)
    out = call(*given)
    first = out[0] if isinstance(out, (tuple, list)) else out
    first.float().sin().sum().backward()
    return [first, *(p.grad for p in module.parameters())]


def mlp(seed: int = 0, width: int = 8) -> torch.nn.Sequential:
    """Two layers."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(width, 16), torch.nn.GELU(), torch.nn.Linear(16, width)
    )
