"""Training on DTensors: parallel styles, FSDP, DDP, optimizers, clipped gradients, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from comparison.program import draw, mlp, on_mesh
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


def _split(module, mesh):
    """Weights sharded by rows, biases too."""

    def place(name, each, mesh):
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


def _steps(module, call, make, clip=True):
    optimizer = make(list(module.parameters()))
    for at in range(2):

        def closure(at=at):
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


def _register(name, make):
    def run(given):
        one, many = mlp(), _split(mlp(), given.mesh)
        yield _steps(many, given.compiled(many), make), _steps(one, one, make)

    run.__name__ = f"trained_by_{name}"
    on_mesh(ways=EAGER)(run)

    def compiled(given):
        """The optimizer's step is compiled."""
        one, many = mlp(), _split(mlp(), given.mesh)
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
        on_mesh(2, ways=EAGER)(compiled)


for _name, _make in _OPTIMIZERS.items():
    _register(_name, _make)


@on_mesh()
def tensor_parallel(given):
    one = mlp()
    many = parallelize_module(mlp(), given.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    out = given.compiled(many)(draw(4, 8))
    out.square().mean().backward()
    ref = one(draw(4, 8))
    ref.square().mean().backward()
    yield [out, *(p.grad for p in many.parameters())], [ref, *(p.grad for p in one.parameters())]


@on_mesh()
def sequence_parallel(given):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    one = build()
    plan = {
        "0": SequenceParallel(use_local_output=False),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    many = parallelize_module(build(), given.mesh, plan)
    x = draw(2, 8, 8)
    sharded = distribute_tensor(x, given.mesh, [Shard(1)], src_data_rank=None)
    out = given.compiled(many)(sharded)
    out.full_tensor().square().mean().backward()
    ref = one(x)
    ref.square().mean().backward()
    yield [out, *(p.grad for p in many.parameters())], [ref, *(p.grad for p in one.parameters())]


@on_mesh()
def prepared_inputs(given):
    one = mlp()
    many = parallelize_module(
        mlp(),
        given.mesh,
        {
            "": PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate()),
            "0": ColwiseParallel(),
            "2": RowwiseParallel(),
        },
    )
    x = draw(8, 8)
    yield given.compiled(many)(x.chunk(4)[given.rank]), one(x)


@on_mesh()
def checkpointed(given):
    one = mlp()
    many = parallelize_module(mlp(), given.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    def step(x):
        return checkpoint(many, x, use_reentrant=False)

    given.compiled(step)(draw(4, 8)).square().mean().backward()
    one(draw(4, 8)).square().mean().backward()
    yield [p.grad for p in many.parameters()], [p.grad for p in one.parameters()]


@on_mesh(ways=EAGER)
def fully_sharded(given):
    from torch.distributed.fsdp import fully_shard

    one, many = mlp(), mlp()
    fully_shard(many, mesh=given.mesh)
    make = _OPTIMIZERS["adamw"]
    yield _steps(many, many, make), _steps(one, one, make)


@on_mesh(2, 2, ways=EAGER)
def fully_sharded_and_tensor_parallel(given):
    from torch.distributed.fsdp import fully_shard

    one, many = mlp(), mlp()
    parallelize_module(many, given.mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(many, mesh=given.mesh["dp"])
    make = _OPTIMIZERS["adamw"]
    yield _steps(many, many, make), _steps(one, one, make)


@on_mesh()
def experts(given):
    """A mixture of experts, whose weights are shared by ranks."""
    up, x = draw(4, 8, 16), draw(12, 8)

    def step(w, tokens):
        return torch.einsum("td,edh->eth", tokens, w).relu().sum(0)

    spread = distribute_tensor(up, given.mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    tokens = distribute_tensor(x, given.mesh, [Replicate()], src_data_rank=None)
    given.compiled(step)(spread, tokens).sum().backward()
    whole = up.clone().requires_grad_()
    step(whole, x).sum().backward()
    yield spread.grad, whole.grad


@on_mesh(ways=EAGER)
def copied(given):
    one, many = mlp(), _split(mlp(), given.mesh)
    other = copy.deepcopy(many)
    yield other(draw(4, 8)), one(draw(4, 8))
    other.load_state_dict(many.state_dict())
    yield list(other.state_dict().values()), list(one.state_dict().values())


@on_mesh()
def accumulated(given):
    one, many = (
        mlp(),
        parallelize_module(mlp(), given.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}),
    )
    call = given.compiled(many)
    for at in range(3):
        call(draw(4, 8, seed=at)).square().mean().backward()
        one(draw(4, 8, seed=at)).square().mean().backward()
    yield [p.grad for p in many.parameters()], [p.grad for p in one.parameters()]
