"""Training on DTensors: parallel styles, FSDP, DDP, optimizers, clipped gradients, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from comparison.dtensors import program
from comparison.feature import draw, mlp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

EAGER = ("eager",)
_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, 0.1, amsgrad=True, foreach=False),
    "adam_fused": lambda p: torch.optim.Adam(p, 0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "nadam": lambda p: torch.optim.NAdam(p, 0.1),
    "radam": lambda p: torch.optim.RAdam(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.9),
    "rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "asgd": lambda p: torch.optim.ASGD(p, 0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=2),
}


def _split(module: nn.Module, mesh: Any) -> nn.Module:
    """Weights sharded by rows, biases too."""

    def place(name: str, each: nn.Module, mesh: Any) -> None:
        for key, parameter in list(each.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            each.register_parameter(key, nn.Parameter(spread))

    return distribute_module(
        module,
        mesh,
        place,
        input_fn=lambda m, a, mesh: (
            a[0]
            if isinstance(a[0], DTensor)
            else DTensor.from_local(a[0], mesh, [Replicate()], run_check=False),
        ),
    )


def _steps(module: nn.Module, call: Any, make: Callable[..., Any], clip: bool = True) -> list[Any]:
    optimizer = make(list(module.parameters()))
    for at in range(2):

        def closure(at: int = at) -> Any:
            optimizer.zero_grad()
            out = call(draw(4, 8, seed=at))
            loss = (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()
            loss.backward()
            return loss

        closure()
        if clip:
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)
    return [p.detach() for p in module.parameters()]


def _register(name: str, make: Callable[..., Any]) -> None:
    def run(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
        one, many = mlp(), _split(mlp(), mesh)
        yield _steps(many, wrap(many), make), _steps(one, one, make)

    run.__name__ = f"trained_by_{name}"
    program(backends=EAGER)(run)

    def compiled(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
        """The optimizer's step is compiled."""
        one, many = mlp(), _split(mlp(), mesh)
        for module in (one, many):
            out = module(draw(4, 8))
            (out.full_tensor() if isinstance(out, DTensor) else out).square().mean().backward()
            optimizer = make(list(module.parameters()))
            step = (
                torch.compile(optimizer.step, backend="aot_eager")
                if module is many
                else optimizer.step
            )
            step()
        yield list(many.parameters()), list(one.parameters())

    if name not in ("lbfgs",):
        compiled.__name__ = f"step_compiled_of_{name}"
        program(2, backends=EAGER)(compiled)


for _name, _make in _OPTIMIZERS.items():
    _register(_name, _make)


@program()
def tensor_parallel(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    one = mlp()
    many = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = wrap(many)(draw(4, 8))
    out.square().mean().backward()
    ref = one(draw(4, 8))
    ref.square().mean().backward()
    yield [out, *(p.grad for p in many.parameters())], [ref, *(p.grad for p in one.parameters())]


@program()
def sequence_parallel(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    one = build()
    plan = {
        "0": SequenceParallel(use_local_output=False),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    many = parallelize_module(build(), mesh, plan)
    x = draw(2, 8, 8)
    given = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None)
    out = wrap(many)(given)
    out.full_tensor().square().mean().backward()
    ref = one(x)
    ref.square().mean().backward()
    yield [out, *(p.grad for p in many.parameters())], [ref, *(p.grad for p in one.parameters())]


@program()
def prepared_inputs(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    one = mlp()
    many = parallelize_module(
        mlp(),
        mesh,
        {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
        },
    )
    x = draw(8, 8)
    yield wrap(many)(x.chunk(4)[rank]), one(x)


@program()
def checkpointed(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    one = mlp()
    many = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(many, x, use_reentrant=False)

    wrap(step)(draw(4, 8)).square().mean().backward()
    one(draw(4, 8)).square().mean().backward()
    yield [p.grad for p in many.parameters()], [p.grad for p in one.parameters()]


@program(backends=EAGER)
def fully_sharded(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    from torch.distributed.fsdp import fully_shard

    one, many = mlp(), mlp()
    fully_shard(many, mesh=mesh)
    make = _OPTIMIZERS["adamw"]
    yield _steps(many, many, make), _steps(one, one, make)


@program(2, 2, backends=EAGER)
def fully_sharded_and_tensor_parallel(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    from torch.distributed.fsdp import fully_shard

    one, many = mlp(), mlp()
    parallelize_module(many, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(many, mesh=mesh["dp"])
    make = _OPTIMIZERS["adamw"]
    yield _steps(many, many, make), _steps(one, one, make)


@program()
def experts(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    """A mixture of experts, whose weights are shared by ranks."""
    up, x = draw(4, 8, 16), draw(12, 8)

    def step(w: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.einsum("td,edh->eth", tokens, w).relu().sum(0)

    spread = distribute_tensor(up, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    tokens = distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)
    wrap(step)(spread, tokens).sum().backward()
    whole = up.clone().requires_grad_()
    step(whole, x).sum().backward()
    yield spread.grad, whole.grad


@program(backends=EAGER)
def copied(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    one, many = mlp(), _split(mlp(), mesh)
    other = copy.deepcopy(many)
    yield other(draw(4, 8)), one(draw(4, 8))
    other.load_state_dict(many.state_dict())
    yield list(other.state_dict().values()), list(one.state_dict().values())


@program()
def accumulated(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    one, many = (
        mlp(),
        parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    )
    call = wrap(many)
    for at in range(3):
        call(draw(4, 8, seed=at)).square().mean().backward()
        one(draw(4, 8, seed=at)).square().mean().backward()
    yield [p.grad for p in many.parameters()], [p.grad for p in one.parameters()]
