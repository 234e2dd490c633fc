"""The steps of one rank in one job, eager or compiled, and the numbers that they give."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as fc
from fuzzing.unlike.program import WIDTH, Event, Function, Program, Weight
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

Seen = dict[str, torch.Tensor]


class Steps:
    """``run(step)`` for each of ``count`` steps; ``seen`` is what came out."""

    def __init__(
        self,
        program: Program,
        rank: int,
        names: dict[str, Any],
        wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self.program, self.rank = program, rank
        self.count = len(program.events[rank])
        self.seen: Seen = {}
        self.calls = {each.name: wrap(names[each.name]) for each in program.functions}
        self.functions = {each.name: each for each in program.functions}
        self.weights = {
            each.name: [self._draw(weight, at) for at, weight in enumerate(each.weights)]
            for each in program.functions
        }
        self.model: Any = names["build"]() if "build" in names else None
        if self.model is not None:
            self.forward = wrap(self.model)
            self.net = getattr(self.model, "module", self.model)  # without DDP around it
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, foreach=False)

    def run(self, step: int) -> None:
        for number, event in enumerate(self.program.events[self.rank][step]):
            with contextlib.redirect_stdout(io.StringIO()):
                self._do(event, step, f"step {step}, {event.what} {event.name} ({number})")

    def _do(self, event: Event, step: int, where: str) -> None:
        if event.what == "reset":
            torch._dynamo.reset()
        elif event.what == "call":
            self._call(self.functions[event.name], event, step, where)
        elif event.what == "quiet":
            with torch.no_grad():
                self._call(self.functions[event.name], event, step, where)
        elif event.what == "forward":
            with torch.no_grad():
                self._keep(where, [self._forward(event, step)])
        elif event.what == "train":
            self._keep(where, [self._train(event, step)])
        elif event.what == "hook":
            self.net.up0.weight.register_hook(self._watch)
        else:
            gradients = [p.grad for p in self.model.parameters()]
            self._keep(f"{where} gradient", gradients)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._keep(f"{where} parameter", list(self.model.parameters()))
            self._keep(f"{where} buffer", list(self.model.buffers()))

    def _forward(self, event: Event, step: int) -> torch.Tensor:
        forward = self.model if "eager" in event.how else self.forward
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in event.how):
            found: torch.Tensor = forward(self._batch(event, step), event.loud, event.head)
        return found

    def _train(self, event: Event, step: int) -> torch.Tensor:
        is_local = "local" in event.how
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not is_local)
        with self.model.no_sync() if self._is_ddp and is_local else contextlib.nullcontext():
            loss = self._forward(event, step).double().square().mean()
            if "outside" in event.how:
                # What only the root of FSDP2 holds stays gathered behind the forward.
                read = self.net.up0 if self._is_ddp else self.net.head0
                loss = loss + 0.1 * read.weight.double().square().sum()
            loss.backward()
        return loss

    @property
    def _is_ddp(self) -> bool:
        return isinstance(self.model, DistributedDataParallel)

    def _watch(self, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's hook that keeps the gradient and replaces it."""
        self._keep(f"hook {len(self.seen)}", [gradient])
        return gradient * 1.5

    def _call(self, function: Function, event: Event, step: int, where: str) -> None:
        weights = self.weights[function.name]
        outputs = self.calls[function.name](self._batch(event, step), *weights, loud=event.loud)
        self._keep(where, outputs)
        leaves = [out for out in outputs if out.requires_grad]
        if function.train and leaves:
            sum(out.double().square().mean() for out in leaves).backward()
            self._keep(f"{where} gradient", [weight.grad for weight in weights])
            for weight in weights:
                weight.grad = None

    def _keep(self, where: str, values: Sequence[torch.Tensor | None]) -> None:
        for at, value in enumerate(values):
            if isinstance(value, DTensor):
                value = value.to_local()
            if isinstance(value, fc.AsyncCollectiveTensor):
                value = value.wait()
            if value is not None:
                self.seen[f"{where} {at}"] = value.detach().clone()

    def _batch(self, event: Event, step: int) -> torch.Tensor:
        """This rank's batch; ranks that share a tensor parallel model have the same."""
        agreeing = "agreeing" in self.program.notes
        share = self.rank // self.program.mesh[-1] if agreeing else self.rank
        chosen = _generator(self.program.seed, 1 + share, 1 + step, event.rows)
        return torch.randn(event.rows, WIDTH, generator=chosen)

    def _draw(self, weight: Weight, at: int) -> torch.Tensor:
        owner = 0 if weight.same else 1 + self.rank
        chosen = _generator(self.program.seed, owner, 0, at)
        made = torch.randn(weight.shape, generator=chosen) / WIDTH**0.5
        training = any(weight in each.weights and each.train for each in self.program.functions)
        return made.to(getattr(torch, weight.dtype)).requires_grad_(training)


def _generator(*numbers: int) -> torch.Generator:
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number) % 2**61
    return torch.Generator().manual_seed(seed)
