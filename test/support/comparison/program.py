"""A program: a function that yields what was found and what is right, compiled in the way it is
given.

    @feature()
    def checkpointed(given):
        run = lambda x: checkpoint(torch.sin, x, use_reentrant=False)
        yield trained(given.compiled(run), (4,)), trained(run, (4,))

``feature`` is of torch without distribution; ``on_mesh`` runs on each rank of a mesh, and compares
with one device. What has no reference yields None for it: then the other side is the reference.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from comparison.outcome import End, compare, numbers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Pairs = Iterator[tuple[Any, Any]]
FEATURES: dict[str, Program] = {}
DTENSORS: dict[str, Program] = {}
THEMES = {
    "features": "autograd compiling exporting modes modules subclasses transforms users".split(),
    "dtensors": "functions loops launches".split(),
}
# Ways to run: eager mode, up to AOTAutograd, through Inductor's lowering, the same with C++
# ("code"), on gloo ranks.
EVERY = ("eager", "aot_eager", "lowered")


@dataclass(frozen=True, slots=True)
class Given:
    """The way and the side; in a program on a mesh also that, and which of its ranks this is."""

    way: str
    side: str
    mesh: Any = None
    rank: int = 0

    @property
    def backend(self) -> str:
        """The backend of this way."""
        inductor = "inductor" if self.side == "upstream" else "dynamo_dist"
        return {"lowered": inductor, "code": inductor}.get(self.way, "aot_eager")

    def compiled(self, function: Any, **options: Any) -> Any:
        """As a user compiles: a feature in one graph, unless said otherwise; on a mesh if the
        way is to.
        """
        if self.way in ("eager", "gloo"):
            return function
        one_graph = self.mesh is None or self.way == "one_graph"
        return torch.compile(function, backend=self.backend, **{"fullgraph": one_graph, **options})


@dataclass(frozen=True, slots=True)
class Program:
    """What runs, in which ways, and on a mesh of which sizes."""

    run: Callable[[Given], Pairs]
    ways: tuple[str, ...]
    mesh: tuple[int, ...] = ()


def feature(*ways: str) -> Callable[[Any], Any]:
    """Register under the function's name; by default for ``aot_eager`` and for Inductor's
    lowering.
    """

    def register(run: Any) -> Any:
        FEATURES[run.__name__] = Program(run, ways or ("aot_eager", "lowered"))
        return run

    return register


def on_mesh(*sizes: int, ways: tuple[str, ...] = ("eager", "aot_eager")) -> Callable[[Any], Any]:
    """Register under the function's name, to be run on a mesh of these sizes."""

    def register(run: Any) -> Any:
        DTENSORS[run.__name__.strip("_")] = Program(run, ways, sizes or (4,))
        return run

    return register


def known(kind: str) -> dict[str, Program]:
    """Every program of "features" or of "dtensors" by its name."""
    for theme in THEMES[kind]:
        importlib.import_module(f"comparison.{kind}_{theme}")
    return FEATURES if kind == "features" else DTENSORS


def judged(pairs: Pairs, what: str = "", relative: float | None = None) -> End:
    """The end of a program that yields these pairs."""
    seen: list[Any] = []
    for at, (found, expected) in enumerate(pairs):
        if expected is None:
            seen.append(found)
        elif problem := compare(found, expected, f"{what}pair {at}", relative):
            return End("wrong", problem)
    return End("right", "", numbers(seen))


def mesh_on_cpu(sizes: tuple[int, ...]) -> DeviceMesh:
    """A mesh of all ranks. One of two dimensions has replicas of tensor-parallel ranks."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])


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
    """The output of a call of ``module`` and the gradients of its parameters, which are set to
    None first.
    """
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
