"""Graphs that Dynamo has not made have ids of their own."""

import itertools
from copy import deepcopy

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_passes
from inductor_passes.inductor.session import compile_with_passes, graph_passes_only
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group
from inductor_passes.torch_compat import caches
from inductor_passes.torch_compat import inductor as inductor_compat
from inductor_passes.torch_compat.inductor import inductor_config

X, W = torch.randn(4, 4), torch.randn(4, 4)


def reduced(x, w):
    return fc.all_reduce(x @ w, "sum", "0").relu()


@pytest.fixture(autouse=True)
def group(monkeypatch):
    monkeypatch.setattr(recorder, "_numbers", itertools.count())
    torch._dynamo.reset()
    with fake_group(4):
        yield


@pytest.fixture
def ids():
    found = []
    unsubscribe = recorder.subscribe(lambda record: found.append(record.graph_id))
    yield found
    unsubscribe()


def traced():
    return make_fx(lambda x, w: (reduced(x, w),))(X, W)


def test_compile_fx_called_directly(ids):
    gm = traced()
    for _ in range(2):
        with caches.no_compile_caches():
            inductor_compat.compile_fx(
                deepcopy(gm), [X, W], inductor_compat.run_graph_passes, inductor_passes.options()
            )
    assert ids == ["fx0:inference", "fx1:inference"]


def test_our_compile_called_directly(ids):
    gm = traced()
    with graph_passes_only():
        for _ in range(2):
            compile_with_passes(deepcopy(gm), [X, W])
        torch.compile(reduced, backend=compile_with_passes)(X, W)
    assert ids == ["fx0:inference", "fx1:inference", "0/0:inference"]


def test_a_backward_graph_has_the_id_of_its_forward_one(ids):
    x = X.clone().requires_grad_()

    def twice(x, w):
        return reduced(reduced(x, w), w)

    with caches.no_compile_caches(), graph_passes_only():
        for _ in range(2):
            (out,) = compile_with_passes(make_fx(lambda x, w: (twice(x, w),))(x, W), [x, W])(x, W)
            out.sum().backward()
    assert ids == [f"fx{n}:{phase}" for n in range(2) for phase in ("forward", "backward")]


def test_graphs_of_aot_autograd_without_dynamo_differ(ids):
    def compiler(gm, inputs, is_backward=False):
        with inductor_config().patch(inductor_passes.options()):
            return make_boxed_func(
                inductor_compat.run_graph_passes(gm, inputs, is_inference=not is_backward) and gm
            )

    for rows in (4, 2):
        run = aot_function(reduced, fw_compiler=compiler, decompositions=select_decomp_table())
        with torch.no_grad():
            run(X[:rows], W)
    assert len(ids) == len(set(ids)) == 2


def test_a_record_of_another_process_gets_a_number_of_this_one():
    assert recorder.in_this_process("0/0:forward") == "0/0:forward"
    assert recorder.in_this_process("fx7:backward") == "fx0:backward"
    assert recorder.in_this_process("fx7:backward") == "fx1:backward"
