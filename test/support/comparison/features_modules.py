"""Modules: recurrent, attention, norms, parametrizations, copies, files, loaders."""

from __future__ import annotations

import copy
import io
import pickle

import torch
import torch.nn.functional as F
from comparison.feature import Given, Pairs, draw, feature, mlp, trained, trained_module
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

_BOTH = ("eager", "aot_eager", "lowered")


def _trained(given: Given, build, *inputs, fullgraph: bool = True) -> Pairs:
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
def recurrent(given: Given) -> Pairs:
    yield from _trained(given, lambda: nn.LSTM(4, 4), draw(3, 2, 4), fullgraph=False)
    yield from _trained(given, lambda: nn.GRU(4, 4), draw(3, 2, 4), fullgraph=False)


@feature()
def attention(given: Given) -> Pairs:
    x = draw(2, 4, 8)
    yield from _trained(
        given, lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), x
    )


@feature()
def attention_masked(given: Given) -> Pairs:
    def run(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    shape = (1, 2, 4, 8)
    yield trained(given.compiled(run), shape, shape), trained(run, shape, shape)
    with sdpa_kernel(SDPBackend.MATH):
        yield trained(given.compiled(run), shape, shape), trained(run, shape, shape)


@feature()
def norms(given: Given) -> Pairs:
    def build():
        return nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
        )

    yield from _trained(given, build, draw(2, 2, 8, 8))


@feature()
def embeddings(given: Given) -> Pairs:
    tokens = torch.arange(6).view(2, 3)
    yield from _trained(given, lambda: nn.Embedding(8, 4, padding_idx=0), tokens)
    yield from _trained(given, lambda: nn.EmbeddingBag(8, 4, mode="mean"), tokens)


@feature()
def losses(given: Given) -> Pairs:
    labels = torch.tensor([0, 2, -100, 1])

    def run(x):
        return F.cross_entropy(x, labels) + F.nll_loss(x, labels, weight=torch.arange(1.0, 5.0))

    yield trained(given.compiled(run), (4, 4)), trained(run, (4, 4))


@feature()
def parametrized(given: Given) -> Pairs:
    from torch.nn.utils import parametrizations, prune

    yield from _trained(
        given, lambda: parametrizations.weight_norm(nn.Linear(4, 4)), draw(2, 4), fullgraph=False
    )
    yield from _trained(
        given,
        lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5),
        draw(2, 4),
        fullgraph=False,
    )


@feature()
def parametrized_by_a_user(given: Given) -> Pairs:
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


@feature("eager", "aot_eager", "lowered")
def copies_and_files(given: Given) -> Pairs:
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


def _saved(what) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


@feature("eager")
def files_of_optimizers(given: Given) -> Pairs:
    module = mlp()
    optimizer = torch.optim.AdamW(module.parameters())
    module(draw(4, 8)).sum().backward()
    optimizer.step()
    state = torch.load(_saved(optimizer.state_dict()))
    yield state["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]


@feature()
def swapped_parameters(given: Given) -> Pairs:
    module = mlp()
    call = given.compiled(module)
    call(draw(4, 8))
    module[0].weight = nn.Parameter(draw(16, 8, seed=4))
    module[2].bias.data = draw(8, seed=5)
    yield call(draw(4, 8)), module(draw(4, 8))


@feature()
def compiled_in_place(given: Given) -> Pairs:
    a, b = mlp(), mlp()
    a.compile(backend=given.backend)
    yield trained_module(a, a, draw(4, 8)), trained_module(b, b, draw(4, 8))


@feature()
def compiled_by_layers(given: Given) -> Pairs:
    a, b = mlp(), mlp()
    for layer in a:
        layer.compile(backend=given.backend)
    yield trained_module(a, a, draw(4, 8)), trained_module(b, b, draw(4, 8))


@feature()
def functional_state(given: Given) -> Pairs:
    module = mlp()
    other = {k: v * 2 for k, v in module.state_dict().items()}

    def run(x):
        return torch.func.functional_call(module, other, (x,))

    yield given.compiled(run)(draw(4, 8)), run(draw(4, 8))


@feature()
def flex(given: Given) -> Pairs:
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
def flex_trained(given: Given) -> Pairs:
    from comparison._torch import flex_attention_anywhere
    from torch.nn.attention.flex_attention import flex_attention

    shape = (1, 2, 128, 16)

    def run(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s * 0.5)

    def dense(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, scale=0.5 / 4)

    with flex_attention_anywhere():
        yield trained(given.compiled(run), shape, shape, shape), trained(dense, shape, shape, shape)
