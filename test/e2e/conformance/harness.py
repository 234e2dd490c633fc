"""What DDP and FSDP2 do, as programs: each runs in eager mode, compiled whole and with compiled
blocks, and is compared.

A program is a function of a ``Side``, which it calls once for each of the three. It trains as users
write it; the side keeps gradients after each backward, and at the end parameters, buffers and what
the last step launched.
"""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from beside_eager import Launches
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

STEPS = 6
WIDTH = 8
PROGRAMS: dict[str, "Program"] = {}
VARIANTS = [(optimizer, ranks) for optimizer in ("sgd", "adamw") for ranks in ("alike", "unlike")]


@dataclass(frozen=True)
class Program:
    """``eager``: words of the reason why the wrapper stays in eager mode; "" if its forward is
    in a graph.
    """

    run: Callable[["Side"], None]
    wrapper: str
    eager: str = ""
    blocks: bool = True  # whether compiling the blocks alone is tried too
    tolerance: float = 2e-5
    fewer: bool = True  # whether launches and bytes are at most eager mode's

    @property
    def text(self):
        return " ".join(inspect.getdoc(self.run).split())


def program(wrapper, **options):
    """Register a program of a wrapper under its name."""

    def register(run):
        name = f"{wrapper}_{run.__name__}"
        assert name not in PROGRAMS
        PROGRAMS[name] = Program(run, wrapper, **options)
        return run

    return register


class Block(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks, and a head of the root's own."""

    def __init__(self, out=4, blocks=2, hidden=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, out, bias=False)

    def features(self, x):
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x):
        return self.head(self.features(x))


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


@dataclass
class Side:
    """One of the three trainings of a program. ``how``: "eager", "whole" or "blocks"."""

    how: str
    optimizer_name: str
    is_unlike: bool
    models: list[nn.Module] = field(default_factory=list)
    found: list[Any] = field(default_factory=list)
    launches: Any = None
    rank: int = field(default_factory=dist.get_rank)

    def compiled(self, function: Any) -> Any:
        """A function or module, compiled on the side that compiles wholes."""
        return self._compile(function) if self.how == "whole" else function

    def _compile(self, function: Any) -> Any:
        return torch.compile(function, backend="dynamo_dist", options={"fallback_random": True})

    def make(self, net: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module], **adamw):
        """A model from weights that all sides share, wrapped; what to call, and its optimizer."""
        torch.manual_seed(1 + len(self.models))
        base = net()
        if self.how == "blocks":
            for block in getattr(base, "blocks", []):
                block.compile(backend="dynamo_dist", options={"fallback_random": True})
        model = wrap(base)
        self.models.append(model)
        return model, self.compiled(model), self.optimizer(model.parameters())

    def optimizer(self, params):
        params = [param for param in params if param.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(params, lr=0.1, momentum=0.9)
        # A larger epsilon, so that gradients of nothing but rounding do not become steps.
        return torch.optim.AdamW(params, lr=0.01, eps=1e-3)

    def batch(self, step, width=WIDTH, seed=0):
        """Rows of this rank's own; ranks that are unlike each other have other numbers of rows."""
        rows = 3 + 2 * self.rank if self.is_unlike else 4
        generator = torch.Generator().manual_seed(1000 * seed + 100 * step + self.rank)
        return torch.randn(rows, width, generator=generator)

    def backward(self, loss, models=None, **options):
        """Run backward, and keep the loss and all gradients."""
        loss.backward(**options)
        self.keep(loss)

    def keep(self, *values):
        """Keep values to be compared, and the gradients of all models as they are now."""
        self.found += [value.detach().clone() for value in values]
        for model in self.models:
            for param in model.parameters():
                grad = param.grad
                if grad is not None and grad.is_sparse:
                    grad = grad.to_dense()
                self.found.append(None if grad is None else local(grad).clone())

    def steps(self, count=STEPS):
        """Numbers of steps; launches of the last one are counted."""
        for i in range(count):
            is_last = i == count - 1
            with Launches() if is_last else contextlib.nullcontext() as launches:
                yield i
            if is_last:
                self.launches = launches

    def finish(self):
        """Keep parameters and buffers, as they are at the end."""
        for model in self.models:
            for each in model.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()  # a forward in eager mode leaves the root gathered
            for value in [*model.parameters(), *model.buffers()]:
                self.found.append(local(value).detach().clone())


def train(side, net, wrap, loss=lambda out: out.square().mean()):
    """Train as most programs do."""
    _, call, optimizer = side.make(net, wrap)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(loss(call(side.batch(i))))
        optimizer.step()


def make_new_code(number):
    """Give the shared models code of its own: what one program leaves to Python stays there for
    the job.
    """
    for cls in (Net, Block):
        for name in {"forward", "features"} & vars(cls).keys():
            function = vars(cls)[name]
            code = function.__code__.replace(co_name=f"{name}_{number}")
            setattr(
                cls,
                name,
                FunctionType(code, function.__globals__, name, None, function.__closure__),
            )


def compare(name, optimizer, ranks):
    """Run a program on three sides; raise what differs. Returns the reasons why its forward was
    not in a graph.
    """
    found = PROGRAMS[name]
    sides, reasons = [], {}
    for how in ("eager", "whole", *(("blocks",) if found.blocks else ())):
        torch._dynamo.reset()
        make_new_code(f"{name}_{optimizer}_{ranks}_{how}")
        counters = torch._dynamo.utils.counters
        counters.clear()
        side = Side(how, optimizer, ranks == "unlike")
        found.run(side)
        side.finish()
        sides.append(side)
        if how == "whole":
            reasons = dict(counters["graph_break"])
            graphs = counters["stats"]["unique_graphs"]
            said = " ".join(" ".join(each.split()) for each in reasons)
            if found.eager:
                assert found.eager in said, f"no break says {found.eager!r}: {said}"
            else:
                assert not reasons, f"breaks: {said}"
                assert graphs, "nothing was compiled"
    eager, *others = sides
    for side in others:
        assert len(side.found) == len(eager.found), side.how
        for i, (ours, want) in enumerate(zip(side.found, eager.found, strict=True)):
            where = f"{side.how}, value {i} of {len(eager.found)}"
            assert (ours is None) == (want is None), f"{where}: {ours} in place of {want}"
            if want is not None:
                close = {"rtol": found.tolerance * 10, "atol": found.tolerance}
                torch.testing.assert_close(ours, want, msg=lambda m, w=where: f"{w}: {m}", **close)
    whole = sides[1].launches
    if found.fewer and eager.launches is not None:
        for kind, count in whole.counts.items():
            assert count <= eager.launches.counts[kind], (whole.counts, eager.launches.counts)
            assert whole.bytes[kind] <= 1.01 * eager.launches.bytes[kind], (
                whole.bytes,
                eager.launches.bytes,
            )
    return reasons
