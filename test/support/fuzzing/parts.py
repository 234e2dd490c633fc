"""Programs for cutting into parts, drawn from a number: products, sums, norms, views, look-ups,
tokens for experts and collectives, forward and backward.

``exact`` ones keep to small whole numbers, of which every sum is exact in any order; the others
take what numbers come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from fuzzing.lockstep import run_in_lockstep
from fuzzing.routing import routed
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from inductor_passes.torch_compat.aot import fake_tensor_mode

N, RANKS = 8, 2
SHAPES = [[N, N]] * 4
c10d, added = torch.ops._c10d_functional, torch.ops.aten.index_put.default
masked = torch.ops.aten._unsafe_masked_index_put_accumulate.default
Program = Callable[..., list[Tensor]]


def reduced(x: Tensor) -> Tensor:
    """The sum over the ranks."""
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", "0"))


def gathered(x: Tensor) -> Tensor:
    """Rows of all ranks."""
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), RANKS, "0"))


def scattered(x: Tensor) -> Tensor:
    """This rank's rows of the sum."""
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x.contiguous(), "sum", RANKS, "0"))


def exchanged(x: Tensor) -> Tensor:
    """Half of the rows for the half of the other rank."""
    half = [N // RANKS] * RANKS
    return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), half, half, "0"))


def attended(x: Tensor, y: Tensor, causal: bool = True) -> Tensor:
    """Attention of one sequence of N tokens, two heads."""
    q, k, v = (z.tanh().view(1, N, 2, N // 2).transpose(1, 2) for z in (x, y, x + y))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return out.transpose(1, 2).reshape(N, N)


def tokens(x: Tensor, w: Tensor, choose: random.Random) -> Tensor:
    """Tokens through experts of other ranks, in a way that is drawn."""
    return routed(x, w, RANKS, choose.randrange(2**20))


class Reduced(torch.autograd.Function):
    """A sum over the ranks, and of the gradient too: rows are a share of the batch."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return reduced(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return reduced(grad)


def drawn(number: int, exact: bool) -> Program:
    """The program of a number: some of its values, and in half of the programs gradients as
    well.
    """

    def program(*inputs: Tensor) -> list[Tensor]:
        choose = random.Random(number)
        if choose.random() < 0.5:
            return _step(choose, inputs, _smooth(choose, exact))
        routed = [tokens(*inputs[:2], choose)] if choose.random() < 0.4 else []
        pool = [*inputs, *routed]
        for _ in range(choose.randint(6, 18)):
            x, y = choose.choice(pool), choose.choice(pool)
            new = _whole(x.clamp(-4, 4), y.clamp(-4, 4), choose.randrange(RANKS * 2))
            new += [lambda a=x, b=y: tokens(a.clamp(-4, 4), b.clamp(-4, 4), choose)] * 2
            if not exact:
                new += _rounded(x, y)
            pool.append(choose.choice(new)())
        return [*pool[-4:], *routed]

    return program


def trained(number: int, exact: bool) -> Callable[..., Tensor]:
    """The forward function of a number, to be trained."""

    def function(*inputs: Tensor) -> Tensor:
        choose = random.Random(number)
        return _layers(choose, inputs, _smooth(choose, exact))

    return function


class _Done(Exception):
    pass


def halves(
    function: Callable[..., Tensor], dtype: torch.dtype, change: Callable[[fx.Graph], None]
) -> tuple[fx.Graph, fx.Graph]:
    """Forward and backward graph as AOTAutograd makes them of the joint graph, once ``change`` was
    made to that.

    Nothing is run: a fake group brings no counts of tokens.
    """
    found: list[fx.Graph] = []

    def partition(joint: fx.GraphModule, inputs: Sequence[object], **how: object) -> tuple:
        change(joint.graph)
        joint.recompile()
        both = min_cut_rematerialization_partition(joint, inputs, **how)
        found.extend(half.graph for half in both)
        raise _Done

    def unused(gm: fx.GraphModule, inputs: Sequence[object]) -> object:
        raise AssertionError("no graph is compiled")

    with fake_tensor_mode():
        given = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in SHAPES]
    try:
        aot_function(function, unused, unused, partition)(*given)
    except _Done:
        pass
    forward, backward = found
    return forward, backward


def step_of(
    graphs: tuple[fx.Graph, fx.Graph], inputs: list[list[Tensor]], tangent: Tensor
) -> list[Tensor]:
    """Result of the forward graph that is the function's, and of the backward graph, of all
    ranks.
    """
    forward, backward = graphs
    made = run_in_lockstep([forward] * RANKS, inputs)
    names = [str(value) for value in forward.output_node().args[0]]  # type: ignore[union-attr]
    wanted = [node.name for node in backward.find_nodes(op="placeholder")]
    saved = [dict(zip(names, of_rank, strict=True)) for of_rank in made]
    given = [[of_rank.get(name, tangent) for name in wanted] for of_rank in saved]
    grads = run_in_lockstep([backward] * RANKS, given)
    found = [[each[0], *of_rank] for each, of_rank in zip(made, grads, strict=True)]
    return [x for x in pytree.tree_leaves(found) if isinstance(x, Tensor)]


def _whole(x: Tensor, y: Tensor, at: int) -> list[Callable[[], Tensor]]:
    """Operators that leave small whole numbers whole and small."""
    index = (x.long() % N).abs()
    return [
        lambda: (x @ y).clamp(-9, 9),
        lambda: torch.addmm(y, x, y),
        lambda: x + y.sum(0, keepdim=True).clamp(-9, 9),
        lambda: torch.where(y > 0, x, y.clamp(-3, 3)),
        lambda: reduced(x),
        lambda: scattered(gathered(x)),
        lambda: gathered(scattered(x)),
        lambda: torch.cat(gathered(x).chunk(RANKS, 0), 1)[:, :N],
        lambda: exchanged(x),
        lambda: x.t().reshape(2, 4, N).transpose(0, 1).reshape(N, N),
        lambda: x.amax(1, keepdim=True) + x.view(4, 2, N).sum(1).repeat(2, 1),
        lambda: torch.bmm(x.view(2, 4, N), y.view(2, 4, N).mT).reshape(4, N).repeat(2, 1),
        lambda: x.flip(0),
        lambda: x.sort(1)[0].cumsum(1).clamp(-9, 9),
        lambda: torch.nn.functional.embedding(index[:, 0], y),
        lambda: y.gather(1, index),
        lambda: torch.scatter(x, 1, index[:, :1], y[:, :1]),
        lambda: y[index[:, 1]],
        lambda: y[:, index[0]],
        lambda: y.index_put((index[:, 0],), x, accumulate=True).clamp(-9, 9),
        lambda: added(y, [None, index[0, :4]], x[:, :4], True).clamp(-9, 9),
        lambda: torch.scatter_add(y, at % 2, index, x).clamp(-9, 9),
        lambda: torch.cat([x[:, 4:], y[:, :4]], 1),
        lambda: torch.nn.functional.pad(x[:, : 4 + at], (0, 4 - at)),
        lambda: torch.select_scatter(x, y[at], 0, at),
        lambda: torch.slice_scatter(x, y[:, :4], 1, at, at + 4),
        lambda: x.topk(4, 1)[0].repeat(1, 2),
        lambda: torch.stack(x.split(4, 0), 1).reshape(N, N),
        lambda: x.argmax(1, keepdim=True).to(x.dtype) + y,
        lambda: y - x.amax(0) + x.amin((0, 1)),
        lambda: (x.clamp(0, 1) * 8).mean(0) + y,
        lambda: torch.where((x > 3).any(0), y, x) + (x > -4).all(),
        lambda: added(x, [y > 1], torch.ones((), dtype=x.dtype)),
        lambda: masked(y, x[:, :1] > 0, [index[:, 0]], x).clamp(-9, 9),
        lambda: masked(y, x > 0, [index], x).clamp(-9, 9),
    ]


def _rounded(x: Tensor, y: Tensor) -> list[Callable[[], Tensor]]:
    """Operators whose results are rounded."""
    return [
        lambda: torch.softmax(x, 1) @ y,
        lambda: torch.log_softmax(x, 0),
        lambda: x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1),
        lambda: torch.nn.functional.layer_norm(x, [N]),
        lambda: torch.nn.functional.silu(x) * y.sigmoid(),
        lambda: x - y.var(1, keepdim=True),
        lambda: attended(x, y),
        lambda: attended(x, y, causal=False) + x.mean(0),
    ]


def _smooth(choose: random.Random, exact: bool) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """Operators with gradients that stay whole and small, or do not."""
    found: list[Callable[[Tensor, Tensor], Tensor]] = [
        lambda x, w: (x @ w).clamp(-4, 4),
        lambda x, w: Reduced.apply(x @ w).clamp(-4, 4),
        lambda x, w: x.relu() + w,
        lambda x, w: x.view(2, 4, N).transpose(0, 1).reshape(N, N) * w.clamp(-1, 1),
        lambda x, w: torch.nn.functional.embedding((w.detach().long() % N).abs()[:, 0], x),
        lambda x, w: tokens(x, w.clamp(-4, 4), choose).clamp(-4, 4),
    ]
    if not exact:
        found += [
            lambda x, w: torch.softmax(x @ w, 1),
            lambda x, w: torch.nn.functional.layer_norm(x, [N]) @ w,
            lambda x, w: attended(x, w @ x),
            lambda x, w: attended(w, x, causal=False),
        ]
    return found


def _step(
    choose: random.Random,
    inputs: Sequence[Tensor],
    operators: Sequence[Callable[[Tensor, Tensor], Tensor]],
) -> list[Tensor]:
    """A few layers and the gradients of all inputs."""
    given = [x.detach().requires_grad_() for x in inputs]
    x = _layers(choose, given, operators)
    grads = torch.autograd.grad((x * given[1].detach()).sum(), given, allow_unused=True)
    return [x.detach(), *(grad for grad in grads if grad is not None)]


def _layers(
    choose: random.Random,
    given: Sequence[Tensor],
    operators: Sequence[Callable[[Tensor, Tensor], Tensor]],
) -> Tensor:
    x = given[0]
    for _ in range(choose.randint(2, 5)):
        x = choose.choice(operators)(x, choose.choice(given[1:]))
    return x
