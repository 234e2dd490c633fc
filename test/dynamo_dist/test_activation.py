"""enable(), disable(), enabled(): what they change in torch, and that it is changed back."""

import threading

import pytest
import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist import activation
from dynamo_dist.cli import doctor
from dynamo_dist.errors import ActivationError, ConfigError, UnsupportedTorchError
from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import patching


@pytest.fixture
def groups():
    from dynamo_dist.testing import fake_mesh

    with fake_mesh(8):
        yield dist.group.WORLD, dist.new_group([0, 1, 2, 3])


def test_one_disable_turns_off_what_many_enable(torch_tables):
    torch_tables.settle()
    before = torch_tables.snapshot()
    dynamo_dist.enable()
    dynamo_dist.enable()
    assert dynamo_dist.is_enabled()
    assert torch_tables.difference(before, torch_tables.snapshot())
    dynamo_dist.disable()
    assert not dynamo_dist.is_enabled()
    dynamo_dist.disable()
    assert torch_tables.difference(before, torch_tables.snapshot()) == []


def test_blocks_nest_and_restore_what_was_before():
    with dynamo_dist.enabled():
        with dynamo_dist.enabled():
            dynamo_dist.disable()
        assert dynamo_dist.is_enabled()
        dynamo_dist.disable()
        with dynamo_dist.enabled():
            dynamo_dist.enable()
        assert not dynamo_dist.is_enabled()
    assert not dynamo_dist.is_enabled()
    dynamo_dist.enable()
    with dynamo_dist.enabled():
        dynamo_dist.disable()
    assert dynamo_dist.is_enabled()


def test_a_block_that_raises_restores_too():
    with pytest.raises(ZeroDivisionError), dynamo_dist.enabled():
        1 / 0
    assert not dynamo_dist.is_enabled()


def test_a_change_that_fails_undoes_the_others(torch_tables, monkeypatch):
    from dynamo_dist.torch_compat import dynamo_compiler

    torch_tables.settle()
    before = torch_tables.snapshot()

    def fail(self):
        raise KeyError("cache_key_tag")

    with monkeypatch.context() as patched:
        patched.setattr(dynamo_compiler.CacheKeyTag, "apply", fail)
        with pytest.raises(ActivationError) as caught:
            dynamo_dist.enable()
    assert str(caught.value).startswith(
        "enable() failed at CacheKeyTag: KeyError('cache_key_tag')."
    )
    assert not dynamo_dist.is_enabled()
    assert torch_tables.difference(before, torch_tables.snapshot()) == []


class Interrupted:
    """A change while which Ctrl-C comes."""

    def apply(self):
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", [0, 20, -1])
def test_ctrl_c_leaves_torch_as_it_was(torch_tables, monkeypatch, at):
    torch_tables.settle()
    before = torch_tables.snapshot()
    upstream = patching.apply

    def apply(patches):
        patches[at] = Interrupted()
        upstream(patches)

    monkeypatch.setattr(patching, "apply", apply)
    with pytest.raises(KeyboardInterrupt):
        dynamo_dist.enable()
    assert not dynamo_dist.is_enabled()
    assert torch_tables.difference(before, torch_tables.snapshot()) == []


def test_what_another_has_wrapped_since_stays_and_is_named(torch_tables):
    from torch._dynamo import convert_frame

    torch_tables.settle()
    before = torch_tables.snapshot()
    upstream = convert_frame.exceeds_recompile_limit
    dynamo_dist.enable()
    ours = convert_frame.exceeds_recompile_limit

    def theirs(*args):
        return ours(*args)

    convert_frame.exceeds_recompile_limit = theirs
    with pytest.raises(ActivationError, match=r"exceeds_recompile_limit\), which is now .*theirs"):
        dynamo_dist.disable()
    assert convert_frame.exceeds_recompile_limit is theirs and not dynamo_dist.is_enabled()
    convert_frame.exceeds_recompile_limit = upstream
    assert torch_tables.difference(before, torch_tables.snapshot()) == []


def test_a_change_that_cannot_be_undone_is_named(monkeypatch):
    from dynamo_dist.torch_compat import dynamo_compiler

    dynamo_dist.enable()
    undo = dynamo_compiler.CacheKeyTag.undo

    def undo_and_fail(self):
        undo(self)
        raise RuntimeError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(dynamo_compiler.CacheKeyTag, "undo", undo_and_fail)
        with pytest.raises(
            ActivationError, match=r"^disable\(\) could not undo CacheKeyTag \(RuntimeError"
        ):
            dynamo_dist.disable()
    assert not dynamo_dist.is_enabled()


def test_threads_that_switch_at_once_leave_torch_whole(torch_tables):
    torch_tables.settle()
    before = torch_tables.snapshot()
    failures = []

    def switch(turn):
        try:
            for _ in range(20):
                (dynamo_dist.enable if turn else dynamo_dist.disable)()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=switch, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dynamo_dist.disable()
    assert failures == []
    assert torch_tables.difference(before, torch_tables.snapshot()) == []


@pytest.mark.parametrize(
    "version", ["2.12.1+cu128", "2.16.0.dev20260701+cpu", "2.9.0a0+git0123abc", "3.0.0", "unknown"]
)
def test_an_unsupported_torch_is_named(monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnsupportedTorchError) as caught:
        dynamo_dist.enable()
    assert str(caught.value) == (
        f"dynamo_dist supports torch 2.13 to 2.15, but this is torch {version}. It changes parts "
        "of torch.compile that differ from version to version. Install a supported one: "
        'pip install "torch>=2.13,<2.16".'
    )
    assert not dynamo_dist.is_enabled()


def test_an_unknown_tracker_is_named(monkeypatch):
    monkeypatch.setenv("DYNAMO_DIST_TRACKERS_OFF", "placement,meshes")
    with pytest.raises(ConfigError) as caught:
        dynamo_dist.enable()
    assert str(caught.value) == (
        "DYNAMO_DIST_TRACKERS_OFF names meshes. The trackers are process_group, device_mesh, "
        "placement. Correct the name or unset the variable."
    )


def test_a_tracker_that_is_off_is_left_to_upstream(monkeypatch, mesh):
    def typed(x, m):
        return x + 1 if type(m) is type(mesh) else x

    x = torch.zeros(2)
    eager = typed(x, mesh)
    with dynamo_dist.enabled():
        assert torch.equal(torch.compile(typed, backend="eager")(x, mesh), eager)
    torch.compiler.reset()
    upstream = torch.compile(typed, backend="eager")(x, mesh)
    torch.compiler.reset()
    monkeypatch.setenv("DYNAMO_DIST_TRACKERS_OFF", "device_mesh")
    with dynamo_dist.enabled():
        assert torch.equal(torch.compile(typed, backend="eager")(x, mesh), upstream)


def test_the_digest_tells_states_apart(monkeypatch):
    one, other = DistConfig(), DistConfig(frozenset({"placement"}))
    assert activation.digest(one) == activation.digest(DistConfig())
    assert activation.digest(one) != activation.digest(other)
    here = activation.digest(one)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert activation.digest(one) != here


def test_the_cache_key_tag_holds_the_digest_in_every_thread():
    import torch.compiler.config as compiler_config

    digest = activation.digest(DistConfig())
    with dynamo_dist.enabled():
        seen = [compiler_config.cache_key_tag]
        thread = threading.Thread(target=lambda: seen.append(compiler_config.cache_key_tag))
        thread.start()
        thread.join()
    assert seen == [f"dynamo_dist-{digest}"] * 2
    assert compiler_config.cache_key_tag == ""


def test_the_user_keeps_a_cache_key_tag_of_their_own():
    import torch.compiler.config as compiler_config

    with compiler_config.patch(cache_key_tag="mine"):
        with dynamo_dist.enabled():
            assert compiler_config.cache_key_tag.startswith("minedynamo_dist-")
        assert compiler_config.cache_key_tag == "mine"
        with dynamo_dist.enabled():
            compiler_config.cache_key_tag = "changed meanwhile"
        assert compiler_config.cache_key_tag == "changed meanwhile"


@pytest.mark.skipif(not doctor._is_installed(), reason="a name needs an installed entry point")
def test_naming_the_backend_enables_again_after_a_disable(torch_tables):
    from torch._dynamo.backends.registry import lookup_backend

    torch_tables.settle()
    before = torch_tables.snapshot()
    for _ in range(2):
        lookup_backend("dynamo_dist")
        assert dynamo_dist.is_enabled()
        dynamo_dist.disable()
        assert not dynamo_dist.is_enabled()
        assert torch_tables.difference(before, torch_tables.snapshot()) == []


def size_of(x, group):
    return x + group.size()


def test_a_compiled_function_outlives_disable(groups, compiled):
    world, sub = groups
    x = torch.zeros(1)
    dynamo_dist.enable()
    run, compiles = compiled(size_of)
    assert run(x, sub).item() == 4
    dynamo_dist.disable()
    assert run(x, sub).item() == 4
    assert len(compiles) == 1  # the guard of the group's size still holds
    assert run(x, world).item() == 8
    assert len(compiles) == 2  # and still fails for another size: traced anew, by upstream


def test_what_is_traced_after_disable_is_traced_by_upstream(groups, compiled):
    dynamo_dist.enable()
    run, _ = compiled(lambda x, group: x + len(group.name()))
    assert run(torch.zeros(1), groups[0]).item() == len(groups[0].name())
    dynamo_dist.disable()
    with pytest.raises(Exception, match="name"):  # upstream knows no such member
        run(torch.zeros(2), groups[0])


def test_what_upstream_gave_up_on_is_looked_at_anew(groups, compiled):
    """A function of which upstream made no graph at all is marked as such, for every later
    compile.
    """

    def reduced(x):
        torch.distributed.reduce(x, 0)

    by_upstream, upstream_graphs = compiled(reduced, fullgraph=False)
    by_upstream(torch.ones(8))
    with dynamo_dist.enabled():
        ours, graphs = compiled(reduced)
        ours(torch.ones(8))
        ours(torch.ones(8))
    assert (len(upstream_graphs), len(graphs)) == (0, 1)


def test_a_backend_that_another_thread_registers_meanwhile(monkeypatch):
    from torch._dynamo.backends import registry

    from dynamo_dist.backend import compile_graph

    dynamo_dist.disable()
    upstream = registry._BACKENDS["dynamo_dist"]

    class Late:
        def load(self):
            registry._COMPILER_FNS["dynamo_dist"] = compile_graph
            return upstream.load()

    monkeypatch.setitem(registry._BACKENDS, "dynamo_dist", Late())
    monkeypatch.delitem(registry._COMPILER_FNS, "dynamo_dist", raising=False)
    assert registry.lookup_backend("dynamo_dist") is compile_graph
    monkeypatch.undo()
    dynamo_dist.disable()
