"""A frame that was loaded runs without a trace where all that its trace depended on is the same; anything else is traced, and named."""

import contextlib
import gc
import os

import pytest
import torch
from frame_calls import backend, call, load
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dynamo_dist import versions
from dynamo_dist.saved import frames
from dynamo_dist.testing import fake_mesh
from inductor_passes.collector import without_cycle_collection

pytestmark = pytest.mark.usefixtures("enabled")
TORCH = versions.parse(torch.__version__)
FACTOR = 2.0


class Block(nn.Module):
    rate = 3

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = 0.5

    def forward(self, x):
        return self.inner(x) * self.scale * FACTOR + self.rate


def sharded(mesh, *placements):
    return DTensor.from_local(torch.ones(2, 4), mesh, placements, run_check=False)


def doubled(x):
    return (x * 2).to_local()


def test_a_module_is_not_traced_again(traced):
    block, x = Block(), torch.randn(2, 4)
    first = call(block, x)
    assert len(traced) == 1
    load()
    assert torch.equal(call(block, x), first) and len(traced) == 1
    # Of another instance with other parameters too, and gradients come.
    other = Block()
    out = call(other, x)
    out.sum().backward()
    assert torch.equal(out, other(x)) and other.inner.weight.grad is not None
    assert len(traced) == 1 and len(frames.kept()) == 1


def test_its_guards_are_there(traced):
    block, x = Block(), torch.randn(2, 4)
    call(block, x)
    load()
    torch._dynamo.reset()
    compiled = torch.compile(block, backend=backend, dynamic=False)
    block.scale = 0.5
    torch.compile(block, backend=backend)(x)
    assert len(traced) == 1
    block.scale = 0.25
    assert torch.equal(compiled(x), block(x)) and len(traced) == 2


def planted(block, monkeypatch, what):
    """Change one thing; the input of the next call."""
    x = torch.randn(2, 4)
    if what == "a number":
        block.scale = 0.25
    elif what == "a size":
        return torch.randn(3, 4)
    elif what == "requires_grad":
        return x.requires_grad_()
    elif what == "a global":
        monkeypatch.setitem(globals(), "FACTOR", 5.0)
    elif what == "a class attribute":
        monkeypatch.setattr(Block, "rate", 4)
    elif what == "a method":
        monkeypatch.setattr(Block, "forward", lambda self, x: self.inner(x) - 1)
    elif what == "another method":
        monkeypatch.setattr(Block, "inner_helper", lambda self: 1, raising=False)
    elif what == "a method of torch":
        stock = nn.Linear.forward
        monkeypatch.setattr(nn.Linear, "forward", lambda self, x: stock(self, x) + 1)
    elif what == "a hook":
        block.inner.register_forward_hook(lambda module, args, out: out + 1)
    elif what == "training":
        block.eval()
    elif what == "a parameter of another class":
        block.inner.weight = nn.Parameter(block.inner.weight.double())
        block.inner.bias = nn.Parameter(block.inner.bias.double())
        return x.double()
    elif what == "a setting":
        torch._dynamo.config.capture_scalar_outputs = True
    elif what == "a file":
        monkeypatch.setattr(frames, "_digest_of_file", lambda path: (path, "another"))
    elif what == "autocast":
        torch.set_autocast_enabled("cpu", True)
    return x


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("a number", "CONSTANT_MATCH on L['self'].scale"),
        ("a size", "TENSOR_MATCH on L['x']"),
        ("requires_grad", "TENSOR_MATCH on L['x']"),
        ("a global", "CONSTANT_MATCH on G['FACTOR']"),
        ("a class attribute", "is another one"),
        ("another method", "TYPE_MATCH on L['self'] is another one"),
        ("a method of torch", "is another one"),
        ("a hook", "_forward_hooks is another one"),
        ("a parameter of another class", "is another one"),
        ("a setting", "torch._dynamo.config.capture_scalar_outputs: False -> True"),
        ("a file", "a change of "),
        ("autocast", "torch's state autocast_state"),
    ],
)
def test_what_changed_is_traced_and_named(traced, monkeypatch, caplog, what, why):
    block = Block()
    call(block.forward, torch.randn(2, 4))
    load()
    caplog.clear()
    try:
        with torch._dynamo.config.patch(capture_scalar_outputs=False):
            x = planted(block, monkeypatch, what)
            assert torch.equal(call(block.forward, x), block.forward(x))
    finally:
        torch.set_autocast_enabled("cpu", False)
    assert len(traced) == 2
    [said] = [each for each in caplog.messages if "is traced" in each]
    assert "not loaded from the folder" in said and why in said


def test_another_program_is_not_among_them(traced, caplog):
    call(doubled_plainly, torch.ones(2))
    load()
    assert torch.equal(call(tripled_plainly, torch.ones(2)), torch.ones(2) * 3)
    assert len(traced) == 2 and "it is not among what was saved" in caplog.text


def doubled_plainly(x):
    return x * 2


def tripled_plainly(x):
    return x * 3


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11 has a function of its own in such a graph")
def test_a_dtensor_is_known_by_its_placements_and_mesh(traced, mesh, caplog):
    x = sharded(mesh, Replicate(), Shard(0))
    call(doubled, x)
    load()
    assert torch.equal(call(doubled, sharded(mesh, Replicate(), Shard(0))), torch.ones(2, 4) * 2)
    assert len(traced) == 1
    for placements in ((Replicate(), Shard(1)), (Shard(0), Replicate()), (Replicate(), Partial())):
        call(doubled, sharded(mesh, *placements))
    assert len(traced) == 4 and "._spec is another one" in caplog.text


@pytest.mark.parametrize(("shape", "rank"), [((4, 2), 0), ((2, 4), 1), ((2, 4), 4)])
def test_another_mesh_or_coordinate_is_another_frame(traced, shape, rank):
    with fake_mesh(2, 4, names=("dp", "tp")) as mesh:
        call(doubled, sharded(mesh, Replicate(), Shard(0)))
    load()
    with fake_mesh(*shape, names=("dp", "tp"), rank=rank) as mesh:
        call(doubled, sharded(mesh, Replicate(), Shard(0)))
    assert len(traced) == 2


def by_environment(x):
    return x * 2 if os.environ.get("DIST_TEST_FLAG") == "1" else x * 3


def test_an_environment_variable_that_was_read_is_guarded(traced, monkeypatch):
    monkeypatch.setenv("DIST_TEST_FLAG", "1")
    call(by_environment, torch.ones(2))
    load()
    monkeypatch.setenv("DIST_TEST_FLAG", "0")
    assert torch.equal(call(by_environment, torch.ones(2)), torch.ones(2) * 3)
    assert len(traced) == 2


def test_a_rank_that_was_read_is_guarded(traced):
    def by_rank(x, mesh):
        return x * (mesh.get_local_rank("tp") + 1) + mesh.get_group("tp").rank()

    found = []
    for rank in (0, 1, 1, 4):
        with fake_mesh(2, 4, names=("dp", "tp"), rank=rank) as mesh:
            found.append((call(by_rank, torch.ones(1), mesh).item(), len(traced)))
        load()
    assert found[:3] == [(1.0, 1), (3.0, 2), (3.0, 2)]
    assert found[3][0] == 1.0 and len(traced) == 3


def test_sizes_that_may_change_and_breaks_are_traced_with_the_reason(traced, caplog):
    def broken(x):
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    def written(x):
        return x.add_(1)

    call(doubled_plainly, torch.ones(3), dynamic=True)
    call(broken, torch.ones(3))
    call(written, torch.ones(3))
    kept = load()
    assert [bool(each.because) for each in kept] == [True] * len(kept)
    before = len(traced)
    call(written, torch.ones(3))
    assert len(traced) == before + 1
    assert "because of a graph that writes to a tensor" in caplog.text
    assert "a graph break" in {each.because for each in kept}


def test_a_guard_without_a_content_is_named(traced, caplog):
    def function(x, items):
        return x * next(items)

    call(function, torch.ones(2), iter((2, 3)))
    [kept] = load()
    assert kept.because.startswith("TUPLE_ITERATOR_LEN on L['items']")
    call(function, torch.ones(2), iter((2, 3)))
    assert len(traced) == 2 and "because of TUPLE_ITERATOR_LEN on L['items']" in caplog.text


def test_an_error_in_asking_is_a_reason_and_no_error(traced, monkeypatch, caplog):
    def failing(*_):
        raise ValueError("planted")
        yield

    call(doubled_plainly, torch.ones(2))
    load()
    monkeypatch.setattr(frames, "contents_of", failing)
    assert torch.equal(call(doubled_plainly, torch.ones(2)), torch.ones(2) * 2)
    assert len(traced) == 2 and "in comparing what it depends on (ValueError" in caplog.text
    [kept] = frames.kept()
    assert "in asking what it depends on (ValueError('planted'))" in kept.because


def test_a_body_that_cannot_be_read_is_traced(traced, caplog):
    call(doubled_plainly, torch.ones(2))
    [kept] = load()
    for each in frames._loaded.values():
        object.__setattr__(each[0], "body", kept.body[:-9])
    assert torch.equal(call(doubled_plainly, torch.ones(2)), torch.ones(2) * 2)
    assert len(traced) == 2 and "what cannot be read" in caplog.text


@pytest.mark.parametrize("part", ["_made", "_graph_module"])
def test_where_torch_has_changed_a_frame_is_traced(traced, caplog, monkeypatch, part):
    def changed(*_):
        raise TypeError("an unexpected keyword argument")

    call(doubled_plainly, torch.ones(2))
    load()
    monkeypatch.setattr(frames.replayed_frames, part, changed)
    assert torch.equal(call(doubled_plainly, torch.ones(2)), torch.ones(2) * 2)
    assert len(traced) == 2 and "an unexpected keyword argument" in caplog.text


def test_an_error_of_the_backend_is_one(traced, monkeypatch):
    def fails(gm):
        raise ValueError("of the backend")

    call(doubled_plainly, torch.ones(2))
    load()
    monkeypatch.setattr(frames, "of_graph", fails)
    with pytest.raises(BackendCompilerFailed, match="of the backend"):
        call(doubled_plainly, torch.ones(2))
    assert len(traced) == 1


def test_the_collection_of_cycles_comes_back_as_it_was():
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with contextlib.suppress(ValueError), without_cycle_collection():
                assert not gc.isenabled()
                raise ValueError
            assert gc.isenabled() == was_on
        finally:
            gc.enable()
