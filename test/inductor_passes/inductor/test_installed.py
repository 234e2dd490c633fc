"""``install()``: ``backend="inductor"`` with the passes, and torch as it was afterwards."""

import contextlib
import functools

import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch import nn
from torch._dynamo.backends import registry
from torch._inductor import config as inductor_config

import inductor_passes
from inductor_passes.errors import OptionError
from inductor_passes.inductor import installed
from inductor_passes.inductor.options import observer
from inductor_passes.testing import fake_group
from inductor_passes.torch_compat import inductor as inductor_compat

WRAPPER = torch._TorchCompileInductorWrapper
X, W = torch.randn(8, 16), torch.randn(16, 16)


def reduced(x, w):
    return fc.all_reduce(x @ w, "sum", "0").relu()


def of_torch():
    registry.lookup_backend("inductor")
    return [(k, id(v)) for k, v in vars(WRAPPER).items()], {
        name: id(fn) for name, fn in registry._COMPILER_FNS.items()
    }


@pytest.fixture(autouse=True)
def upstream_again():
    torch._dynamo.reset()
    before = of_torch()
    with fake_group(4):
        yield
    inductor_passes.uninstall()
    torch._dynamo.reset()
    assert of_torch() == before


def test_it_is_undone_exactly():
    before = of_torch()
    inductor_passes.uninstall()
    assert of_torch() == before
    inductor_passes.install()
    once = of_torch()
    assert once != before
    inductor_passes.install()
    assert of_torch() == once
    inductor_passes.uninstall()
    assert of_torch() == before
    inductor_passes.uninstall()
    assert of_torch() == before


class Module(nn.Module):
    def forward(self, x, w):
        return reduced(x, w)


def compiled_in_place():
    module = Module()
    module.compile()
    return module


WAYS = {
    "default": lambda: torch.compile(reduced),
    "named": lambda: torch.compile(reduced, backend="inductor"),
    "a mode": lambda: torch.compile(reduced, mode="max-autotune-no-cudagraphs", dynamic=True),
    "Inductor's options": lambda: torch.compile(reduced, options={"max_autotune": False}),
    "module.compile": compiled_in_place,
    "decorator": lambda: torch.compile(backend="inductor")(reduced),
    "optimize": lambda: torch._dynamo.optimize("inductor")(reduced),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_inductor_runs_the_passes(graphs, way):
    inductor_passes.install()
    WAYS[way]()(X, W)
    (graph,) = graphs
    assert [c.kind for c in graph.collectives] == ["all_reduce"]
    assert "schedule" in {p.name for p in graph.passes}
    inductor_passes.uninstall()


def test_compare_counts_what_was_wrapped_before_it(graphs, by_upstream):
    before = torch.compile(reduced, dynamic=False)
    inductor_passes.install()
    with contextlib.suppress(Exception):  # torch's entry is a stand-in
        before(X, W)
    assert by_upstream[0].keys() > {"post_grad_custom_post_pass"}
    inductor_passes.uninstall()
    before(X[:4], W)
    assert by_upstream[1:] == [{}]


def test_options_of_ours_for_all_and_for_one(graphs):
    inductor_passes.install(schedule="off")
    assert "schedule" not in ran(graphs)
    assert "schedule" in ran(graphs, schedule={"bucket": True})
    inductor_passes.install({"passes": ["schedule"]})
    assert ran(graphs) == {"schedule"}
    assert ran(graphs, passes=[]) == set()
    assert ran(graphs, disable=["schedule"], max_autotune=False) == set()


def ran(graphs, **options):
    graphs.clear()
    torch._dynamo.reset()
    torch.compile(reduced, options=options or None)(X, W)
    (graph,) = graphs
    return {p.name for p in graph.passes}


def test_compiles_with_other_options_share_no_code(graphs):
    inductor_passes.install()
    for options in ({"passes": []}, {"passes": ["schedule"]}, {"passes": []}):
        torch.compile(reduced, options=options)(X, W)
    assert [len(graph.passes) for graph in graphs] == [0, 1]


def test_options_that_were_attached_by_hand_hold(graphs):
    inductor_passes.install()
    called = []
    attached = inductor_passes.options(
        passes=["schedule"], post_grad_custom_post_pass=lambda graph: called.append(graph)
    )
    assert ran(graphs, **attached) == {"schedule"}
    assert len(called) == 1
    assert ran(graphs, **attached, disable=["schedule"]) == set()


def test_what_only_looks_at_graphs_gives_way(graphs):
    looking = {"post_grad_custom_post_pass": observer()}
    inductor_passes.install()
    assert "schedule" in ran(graphs, **looking)
    assert ran(graphs, **looking, passes=[]) == set()
    inductor_passes.uninstall()
    with inductor_config.patch(looking):
        assert "schedule" in ran(graphs, **inductor_passes.options())
    assert len(graphs) == 1  # recorded once


def test_passes_that_a_user_has_set_run_and_stay(graphs):
    called = []

    def mine(graph):
        called.append("mine")

    inductor_passes.install()
    with inductor_config.patch(post_grad_custom_post_pass=mine, post_grad_custom_pre_pass=mine):
        torch.compile(reduced)(X, W)
        assert inductor_config.post_grad_custom_post_pass is mine
        inductor_passes.uninstall()
        assert inductor_config.post_grad_custom_pre_pass is mine
    assert called == ["mine", "mine"]
    assert len(graphs) == 1


def test_unknown_options_say_which_are_known():
    with pytest.raises(OptionError, match=r"install\(\) got the option 'max_autotune'.*schedule"):
        inductor_passes.install(max_autotune=True)
    with pytest.raises(RuntimeError, match="Unexpected optimization option schedule"):
        torch.compile(reduced, options={"schedule": "off"})
    inductor_passes.install()
    with pytest.raises(OptionError, match=r"Unknown option 'shedule'\. Ours are passes"):
        torch.compile(reduced, options={"shedule": "off"})
    with pytest.raises(OptionError, match="'schedule' is 'of'"):
        torch.compile(reduced, options={"schedule": "of"})


def test_a_plain_graph_is_compiled_by_torch_as_without_us(by_upstream):
    def plain(x):
        return torch.relu(x)

    for options in (None, {"max_autotune": True}):
        torch.compile(plain, options=options)(X)
    upstream = list(by_upstream)
    by_upstream.clear()
    torch._dynamo.reset()
    inductor_passes.install()
    for options in (None, {"max_autotune": True}, {"max_autotune": True, "schedule": "off"}):
        torch.compile(plain, options=options)(X)
    assert by_upstream == [*upstream, upstream[-1]]


def test_ahead_of_time_compiles_stay_torchs():
    inductor_passes.install()
    with pytest.raises(RuntimeError, match="Unexpected optimization option schedule"):
        torch.compile(reduced, options={"use_aoti": True, "schedule": "off"})


def test_each_owner_has_its_part(graphs):
    compiled = []

    def compile_graph(gm, inputs, own, inductor, region):
        compiled.append(own.passes)
        return gm.forward

    before = of_torch()
    installed.put("other", installed.Part({"passes": []}, compile_graph))
    run_once()
    inductor_passes.install(passes=["schedule"])
    run_once()
    inductor_passes.uninstall()
    run_once()
    assert compiled == [(), ("schedule",), ()]
    with installed.uninstalled():
        assert of_torch() == before
    installed.put("other", None)
    assert of_torch() == before and graphs == []


def run_once():
    torch._dynamo.reset()
    torch.compile(reduced)(X, W)


def test_torch_goes_its_own_way_when_another_keeps_our_function(by_upstream):
    inductor_passes.install()
    kept = WRAPPER.__call__
    inductor_passes.uninstall()
    wrapper = WRAPPER(None, {"max_autotune": True}, None)
    kept(wrapper, torch.fx.symbolic_trace(lambda x: x + 1), [X])
    assert by_upstream == [{"max_autotune": True}]


def test_a_failed_change_leaves_nothing(monkeypatch):
    before = of_torch()

    class Table(dict):
        def __setitem__(self, key, value):
            if not self.get("failed"):
                self.update(failed=True)
                raise KeyboardInterrupt
            super().__setitem__(key, value)

    with monkeypatch.context() as patched:
        patched.setattr(registry, "_COMPILER_FNS", Table(registry._COMPILER_FNS))
        with pytest.raises(KeyboardInterrupt):
            inductor_passes.install()
    assert of_torch() == before


def test_the_compile_keeps_its_name(graphs, monkeypatch):
    seen = []
    upstream = inductor_compat.compile_fx

    def compile_fx(gm, inputs, inner, patches, region=None):
        seen.append(region)
        return upstream(gm, inputs, inner, patches, region)

    monkeypatch.setattr(inductor_compat, "compile_fx", compile_fx)
    inductor_passes.install()
    torch.compile(reduced)(X, W)
    named = functools.partial(torch.compile, name="block")
    try:
        function = named(reduced)
    except TypeError:  # torch 2.11
        assert seen == [None]
    else:
        function(X, W)
        assert seen == [None, "block"]
