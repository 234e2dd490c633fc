"""Tokens that go to experts on other ranks and back, in the ways in which programs write that."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

c10d = torch.ops._c10d_functional
EXPERTS, TOP = 4, 2


class Exchanged(torch.autograd.Function):
    """Rows by how many go to each rank and come from it; gradients go back."""

    @staticmethod
    def forward(ctx: object, x: Tensor, gets: Sequence[int], sends: Sequence[int]) -> Tensor:
        ctx.sizes = sends, gets  # type: ignore[attr-defined]
        return c10d.wait_tensor(c10d.all_to_all_single(x.contiguous(), gets, sends, "0"))

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple:
        sends, gets = ctx.sizes  # type: ignore[attr-defined]
        back = c10d.all_to_all_single(grad.contiguous(), sends, gets, "0")
        return c10d.wait_tensor(back), None, None


def counted(keys: Tensor, choose: random.Random) -> Tensor:
    """How often each expert is chosen."""
    ones = torch.ones_like(keys)
    none = torch.zeros(EXPERTS, dtype=keys.dtype)
    return choose.choice(
        (
            lambda: torch.nn.functional.one_hot(keys, EXPERTS).sum(0),
            lambda: none.scatter_add(0, keys, ones),
            lambda: none.index_put((keys,), ones, accumulate=True),
            lambda: torch.histc(keys.double(), EXPERTS, 0, EXPERTS).long(),
        )
    )()


def routed(x: Tensor, w: Tensor, ranks: int, seed: int) -> Tensor:
    """Each of the tokens of ``x`` [n, n] through ``TOP`` of ``EXPERTS`` experts of ``w`` [n, n],
    a share of them on each rank.
    """
    choose = random.Random(seed)
    n, each = len(x), EXPERTS // ranks
    chosen = (x.detach()[:, :TOP].long() % EXPERTS).abs()
    flat = chosen.reshape(-1)
    order = choose.choice((lambda: flat.argsort(stable=True), lambda: flat.sort()[1]))()
    here = counted(flat, choose)
    even = [each] * ranks
    there = c10d.wait_tensor(c10d.all_to_all_single(here, even, even, "0"))
    sends, gets = (counts.view(ranks, -1).sum(1).tolist() for counts in (here, there))
    for size in (*sends, *gets):
        torch._check(size >= 0)
    torch._check(sum(sends) == n * TOP)
    rows = choose.choice((lambda: x[order // TOP], lambda: x.repeat_interleave(TOP, 0)[order]))()
    came = Exchanged.apply(rows, gets, sends)
    labels = torch.arange(EXPERTS).view(ranks, -1)[0].repeat(ranks)
    mine = labels[torch.repeat_interleave(there, output_size=sum(gets))]
    sort = choose.random() < 0.5
    again = mine.argsort(stable=True)
    worked, mine = (came[again], mine[again]) if sort else (came, mine)
    out = torch.zeros_like(worked)
    for expert in range(each):
        out = out + (worked @ w.roll(expert, 0)) * (mine == expert)[:, None]
    out = out.clamp(-4, 4)
    if sort:
        out = torch.zeros_like(out).index_put((again,), out)
    back = Exchanged.apply(out, sends, gets)
    weights = (chosen + 1).to(x.dtype).reshape(-1)
    by_token = torch.zeros_like(x)
    placed = choose.choice(
        (
            lambda: torch.zeros(n * TOP, n, dtype=x.dtype).index_copy(0, order, back),
            lambda: back[order.argsort()],
            lambda: torch.zeros(n * TOP, n, dtype=x.dtype).index_put((order,), back),
            lambda: None,
        )
    )()
    if placed is not None:
        return (weights[:, None] * placed).view(n, TOP, n).sum(1).clamp(-9, 9)
    scaled, token = back * weights[order][:, None], order // TOP
    return choose.choice(
        (
            lambda: by_token.index_add(0, token, scaled),
            lambda: by_token.scatter_add(0, token[:, None].expand(-1, n), scaled),
            lambda: by_token.index_put((token,), scaled, accumulate=True),
        )
    )().clamp(-9, 9)
