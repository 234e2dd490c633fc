"""Modules: recurrent, attention, norms, parametrizations, copies, files, loaders."""

from __future__ import annotations

import copy
import io
import pickle

import torch
import torch.nn.functional as F
from comparison.program import EVERY, draw, feature, mlp, trained, trained_module
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel


def _trained(given, build, *inputs, fullgraph=True):
    torch.manual_seed(0)
    a = build()
    torch.manual_seed(0)
    b = build()
    yield (
        trained_module(a, given.compiled(a, fullgraph=fullgraph), *inputs),
        trained_module(b, b, *inputs),
    )
    yield list(a.buffers()), list(b.buffers())


@feature()
def recurrent(given):
    yield from _trained(given, lambda: nn.LSTM(4, 4), draw(3, 2, 4), fullgraph=False)
    yield from _trained(given, lambda: nn.GRU(4, 4), draw(3, 2, 4), fullgraph=False)


@feature()
def attention_masked(given):
    def run(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    shape = (1, 2, 4, 8)
    yield trained(given.compiled(run), shape, shape), trained(run, shape, shape)
    with sdpa_kernel(SDPBackend.MATH):
        yield trained(given.compiled(run), shape, shape), trained(run, shape, shape)


@feature()
def parametrized_by_a_user(given):
    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).t()

    def build():
        layer = nn.Linear(4, 4)
        nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    a = build()
    b = build()
    b.load_state_dict(a.state_dict())
    yield (
        trained_module(a, given.compiled(a, fullgraph=False), draw(2, 4)),
        trained_module(b, b, draw(2, 4)),
    )


@feature(*EVERY)
def copies_and_files(given):
    module = mlp()
    x = draw(4, 8)
    call = given.compiled(module)
    call(x)
    yield copy.deepcopy(call)(x), module(x)
    yield pickle.loads(pickle.dumps(module))(x), module(x)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield torch.load(file, weights_only=False)(x), module(x)
    other = mlp(1)
    other.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in call.state_dict().items()})
    yield other(x), module(x)
    yield torch.load(_saved(module.state_dict())), module.state_dict()


def _saved(what):
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


@feature()
def swapped_parameters(given):
    module = mlp()
    call = given.compiled(module)
    call(draw(4, 8))
    module[0].weight = nn.Parameter(draw(16, 8, seed=4))
    module[2].bias.data = draw(8, seed=5)
    yield call(draw(4, 8)), module(draw(4, 8))


@feature()
def compiled_in_place(given):
    a, b = mlp(), mlp()
    a.compile(backend=given.backend)
    yield trained_module(a, a, draw(4, 8)), trained_module(b, b, draw(4, 8))


@feature()
def functional_state(given):
    module = mlp()
    other = {k: v * 2 for k, v in module.state_dict().items()}

    def run(x):
        return torch.func.functional_call(module, other, (x,))

    yield given.compiled(run)(draw(4, 8)), run(draw(4, 8))


@feature()
def flex(given):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    q = draw(1, 2, 128, 16)

    def run(q, k, v):
        return flex_attention(
            q, k, v, score_mod=lambda s, b, h, i, j: s + (i - j) * 0.01, block_mask=mask
        )

    def dense(q, k, v):
        at = torch.arange(128)
        bias = (at[:, None] - at) * 0.01
        bias = bias.masked_fill(at[:, None] < at, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    yield given.compiled(run)(q, q, q), dense(q, q, q)


@feature("aot_eager")
def flex_trained(given):
    from comparison._torch import flex_attention_anywhere
    from torch.nn.attention.flex_attention import flex_attention

    shape = (1, 2, 128, 16)

    def run(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5)

    def dense(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=0.5 / 4)

    with flex_attention_anywhere():
        yield trained(given.compiled(run), shape, shape, shape), trained(dense, shape, shape, shape)
