"""``enable(inductor=True)``: ``backend="inductor"`` compiles as ``backend="dynamo_dist"`` does,
until ``disable()``.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

import dynamo_dist
import inductor_passes
from dynamo_dist import autoload, patches
from dynamo_dist import graph_compile as inductor_backend
from dynamo_dist.errors import ConfigError
from dynamo_dist.numerics import comparison
from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import dynamo_compiler, patching
from inductor_passes.errors import OptionError


@pytest.fixture
def upstream(torch_tables):
    """``upstream()`` tells whether all tables of torch are as at first."""
    torch_tables.settle()
    torch_tables.snapshot()
    before = torch_tables.snapshot()
    yield lambda: torch_tables.difference(before, torch_tables.snapshot()) == []
    inductor_passes.uninstall()


def step(x, w, mesh):
    """The mesh's members are ours to trace."""
    return (x @ w).redistribute(placements=[Replicate()]).to_local() * mesh.get_group().size()


def inputs(mesh):
    x = DTensor.from_local(torch.ones(8, 4), mesh, [Shard(1)], run_check=False)
    return x, DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)], run_check=False), mesh


def test_a_program_is_traced_by_our_trackers_and_gets_the_passes(graphs, mesh):
    dynamo_dist.enable(inductor=True)
    torch.compile(step, fullgraph=True)(*inputs(mesh["tp"]))
    (graph,) = graphs
    assert [c.kind for c in graph.collectives] == ["all_reduce"]


def test_asked_twice_and_asked_late(upstream):
    dynamo_dist.enable()
    assert inductor_backend.taken() is None
    dynamo_dist.enable(inductor=True)
    assert inductor_backend.taken() == {}
    dynamo_dist.enable(inductor={"schedule": "off"})
    dynamo_dist.enable(inductor=True)
    dynamo_dist.enable()
    assert inductor_backend.taken() == {"schedule": "off"}
    dynamo_dist.disable()
    dynamo_dist.disable()
    assert inductor_backend.taken() is None
    assert upstream()


def test_blocks_leave_what_was_before(upstream):
    with dynamo_dist.enabled(inductor=True):
        assert inductor_backend.taken() == {}
        with dynamo_dist.enabled(inductor={"exact": True}):
            assert inductor_backend.taken() == {"exact": True}
            dynamo_dist.disable()
        assert inductor_backend.taken() == {}
    assert upstream()
    with dynamo_dist.enabled():
        with dynamo_dist.enabled(inductor=True):
            pass
        assert inductor_backend.taken() is None
    assert upstream()


def test_install_and_enable_are_undone_each_by_its_own(upstream, torch_tables):
    inductor_passes.install()
    installed = torch_tables.snapshot()
    dynamo_dist.enable(inductor=True)
    dynamo_dist.disable()
    assert torch_tables.difference(installed, torch_tables.snapshot()) == []
    dynamo_dist.enable(inductor=True)
    inductor_passes.uninstall()
    assert inductor_backend.taken() == {} and not upstream()
    dynamo_dist.disable()
    assert upstream()


def test_options_are_checked_before_anything_is_done(upstream):
    with pytest.raises(OptionError, match=r"enable\(inductor=\.\.\.\) got the option 'shedule'"):
        dynamo_dist.enable(inductor={"shedule": "off"})
    assert not dynamo_dist.is_enabled()
    dynamo_dist.enable(inductor={"disable": ["below_autograd"]})
    dynamo_dist.disable()
    assert upstream()


def test_a_mapping_without_options_asks_for_it_too(upstream):
    dynamo_dist.enable(inductor={})
    assert inductor_backend.taken() == {}
    dynamo_dist.disable()
    assert upstream()


def test_the_environment_asks(upstream, monkeypatch):
    monkeypatch.setenv("DYNAMO_DIST_INDUCTOR", "0")
    with dynamo_dist.enabled():
        assert inductor_backend.taken() is None
    monkeypatch.setenv("DYNAMO_DIST_INDUCTOR", "1")
    with dynamo_dist.enabled():
        assert inductor_backend.taken() == {}
    assert upstream()
    monkeypatch.setenv("DYNAMO_DIST_INDUCTOR", "yes")
    with pytest.raises(ConfigError, match=r"DYNAMO_DIST_INDUCTOR is 'yes'.*Set it to 1 or 0"):
        dynamo_dist.enable()


def test_the_first_compile_enables_where_the_environment_asks(monkeypatch):
    asked, upstream = [], torch.compile
    monkeypatch.setattr(dynamo_compiler, "before_first_compile", asked.append)
    monkeypatch.setattr(autoload, "log_names_are_in_time", lambda internal: False)
    autoload.register_log_names()
    assert asked == []
    monkeypatch.setenv("DYNAMO_DIST_INDUCTOR", "1")
    autoload.register_log_names()
    (enable,) = asked
    monkeypatch.undo()
    monkeypatch.setenv("DYNAMO_DIST_INDUCTOR", "1")
    in_place = torch.nn.Module.compile
    for compiles in (
        lambda: torch.compile(torch.relu),
        lambda: torch.nn.Linear(1, 1).compile(),
    ):
        dynamo_compiler.before_first_compile(enable)
        early = torch.compile
        assert not dynamo_dist.is_enabled() and torch.nn.Module.compile is not in_place
        compiles()
        assert inductor_backend.taken() == {}
        dynamo_dist.disable()
        assert torch.compile is upstream and torch.nn.Module.compile is in_place
        early(torch.relu)
        assert not dynamo_dist.is_enabled()


def test_what_cannot_be_enabled_says_so_at_each_compile():
    def fail():
        raise ConfigError("no", "", "")

    upstream, in_place = torch.compile, torch.nn.Module.compile
    dynamo_compiler.before_first_compile(fail)
    try:
        for compile in (torch.compile, torch.compile, torch.nn.Linear(1, 1).compile):
            with pytest.raises(ConfigError):
                compile()
    finally:
        torch.compile, torch.nn.Module.compile = upstream, in_place
        dynamo_compiler._awaited.clear()


def test_another_wrapper_of_compile_stays():
    asked, calls, upstream, in_place = [], [], torch.compile, torch.nn.Module.compile
    dynamo_compiler.before_first_compile(lambda: asked.append(1))
    waiting = torch.compile

    def theirs(*args):
        calls.append(args)
        return waiting(*args)

    torch.compile = theirs
    try:
        for _ in range(2):
            assert callable(torch.compile(torch.relu))
        assert asked == [1] and len(calls) == 2 and torch.compile is theirs
        assert torch.nn.Module.compile is in_place
    finally:
        torch.compile = upstream


def test_a_comparison_does_not_enable_in_the_midst_of_it(upstream, monkeypatch):
    monkeypatch.setenv("DYNAMO_DIST_INDUCTOR", "1")
    dynamo_compiler.before_first_compile(dynamo_dist.enable)
    with comparison.plugin_for("upstream"):
        torch.compile(torch.relu)
        assert not dynamo_dist.is_enabled() and upstream()
    assert inductor_backend.taken() == {}  # as the first compile would have left it
    dynamo_dist.disable()


def test_it_is_listed_with_the_patches():
    listed = patches.listed(DistConfig(inductor=True))
    assert "torch._TorchCompileInductorWrapper.__call__" in listed[-1].places[0]
    assert listed[-1].versions == "2.13 to 2.15"
    assert listed[-1].why.endswith("``enable(inductor=True)``.")
    with dynamo_dist.enabled(inductor=True):
        assert patches._place(patching._applied[-1]) == ", ".join(listed[-1].places)


def test_upstream_is_upstream_in_a_comparison(upstream):
    inductor_passes.install()
    with dynamo_dist.enabled(inductor={"exact": True}):
        with comparison.plugin_for("upstream"):
            assert not dynamo_dist.is_enabled() and upstream()
        assert inductor_backend.taken() == {"exact": True}
        with comparison.plugin_for("ours"):
            assert dynamo_dist.is_enabled()
    assert not dynamo_dist.is_enabled() and not upstream()


def test_plain_graphs_stay_torchs(mesh, by_upstream):
    with dynamo_dist.enabled(inductor={"schedule": "off"}):
        torch.compile(torch.relu)(torch.ones(2))
    assert by_upstream == [{}]
