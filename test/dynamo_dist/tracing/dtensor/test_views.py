"""Views of DTensor inputs that a compiled function returns: eager's values, memory, gradients."""

import pickle

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dynamo_dist.errors import DTensorError
from dynamo_dist.tracing import dtensor_views

pytestmark = pytest.mark.usefixtures("enabled")

SHARD0 = (Replicate(), Shard(0))
BOTH = (Shard(0), Shard(1))


def tensor(mesh, placements=SHARD0, shape=(16, 8), requires_grad=False):
    torch.manual_seed(0)
    full = torch.randn(shape)
    return distribute_tensor(full, mesh, placements, src_data_rank=None).requires_grad_(
        requires_grad
    )


CHAINS = {
    "transpose": lambda d: d.t(),
    "slice": lambda d: d[:, 2:6],
    "slice with a step": lambda d: d[:, 1::2],
    "two selects of equal size and stride": lambda d: (d[:, 1], d[:, 3]),
    "chain": lambda d: d.view(16, 2, 4)[:, 1].t().unsqueeze(0),
    "expand": lambda d: d.unsqueeze(1).expand(16, 3, 8),
    "permuted and flattened": lambda d: (
        d.view(16, 2, 4).permute(1, 0, 2).transpose(0, 1).flatten(1)
    ),
    "with compute": lambda d: (d * 2, d.t()),
    "of a detached one": lambda d: d.detach().t()[1:3],
    "itself and a view": lambda d: (d, d.t()),
    "view of an intermediate": lambda d: (d * 2).t(),
}


def as_list(value):
    return list(value) if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("placements", [SHARD0, BOTH], ids=["one", "both"])
@pytest.mark.parametrize("name", CHAINS)
def test_a_view_is_eagers(mesh, name, placements, requires_grad):
    program = CHAINS[name]
    eager, traced = (tensor(mesh, placements, requires_grad=requires_grad) for _ in range(2))
    try:
        expected = as_list(program(eager))
    except RuntimeError as error:  # DTensor itself refuses, e.g. to select in a sharded dimension
        pytest.skip(str(error)[:60])
    found = as_list(torch.compile(program, backend="aot_eager", fullgraph=True)(traced))
    for a, b in zip(expected, found, strict=True):
        assert (a.shape, a.stride(), a.placements) == (b.shape, b.stride(), b.placements)
        assert a.requires_grad == b.requires_grad
        assert torch.equal(a._local_tensor, b._local_tensor)
        shares = lambda x, base: (  # noqa: E731
            x._local_tensor.untyped_storage().data_ptr()
            == base._local_tensor.untyped_storage().data_ptr()
        )
        assert shares(a, eager) == shares(b, traced)
        if shares(a, eager) and a is not eager:
            assert b._local_tensor.storage_offset() == a._local_tensor.storage_offset()
    if requires_grad and expected[-1].requires_grad:
        for outputs in (expected, found):
            sum((out * out).sum() for out in outputs).full_tensor().backward()
        assert torch.equal(eager.grad.full_tensor(), traced.grad.full_tensor())


def test_a_returned_view_writes_to_its_input(mesh):
    d = tensor(mesh)
    version = d._version
    view = torch.compile(lambda d: d[:, 2], backend="aot_eager", fullgraph=True)(d)
    view.fill_(7.0)
    assert view._base is d
    assert d._version == version + 1
    assert torch.equal(d._local_tensor[:, 2], torch.full((4,), 7.0))


def test_an_input_written_to_and_a_view_of_it(mesh):
    eager, traced = tensor(mesh), tensor(mesh)

    def program(d):
        d.add_(1)
        return d.t()

    expected = program(eager)
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(traced)
    assert torch.equal(expected._local_tensor, found._local_tensor)
    assert torch.equal(eager._local_tensor, traced._local_tensor)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_view_that_communicates_is_a_tensor_of_its_own(mesh, requires_grad):
    """A select in the sharded dimension gathers: eager's result shares no memory with the input."""
    eager, traced = (tensor(mesh, requires_grad=requires_grad) for _ in range(2))
    graphs = []

    def count(graph, inputs):
        launches = [n for n in graph.graph.nodes if "all_gather" in str(n.target)]
        graphs.append(len(launches))
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        lambda d: d[3], backend=aot_autograd(fw_compiler=count), fullgraph=True
    )
    expected, found = eager[3], compiled(traced)
    assert graphs[0] == 1
    assert (expected.placements, expected.shape) == (found.placements, found.shape)
    assert expected.requires_grad == found.requires_grad
    if requires_grad:
        for out in (expected, found):
            out.sum().full_tensor().backward()
        assert torch.equal(eager.grad.full_tensor(), traced.grad.full_tensor())


def test_dynamic_sizes_are_solved_from_the_call(mesh):
    sizes = []

    def backend(graph, inputs):
        sizes.append(1)
        return lookup_backend("aot_eager")(graph, inputs)

    def program(d):
        n = d.shape[0]
        return d.view(n // 2, 2, 8)[: n // 4]

    compiled = torch.compile(program, backend=backend, fullgraph=True, dynamic=True)
    for rows in (16, 32, 48):
        d = distribute_tensor(
            torch.randn(rows, 8), mesh, (Replicate(), Replicate()), src_data_rank=None
        )
        found, expected = compiled(d), program(d)
        assert found.shape == expected.shape
        assert torch.equal(found._local_tensor, expected._local_tensor)
        assert found._local_tensor.data_ptr() == d._local_tensor.data_ptr()
    assert len(sizes) == 1


def test_sizes_that_are_so_many_times_a_local_one(mesh):
    def program(d):
        return d.flatten(0, 1), d @ d.redistribute(placements=(Replicate(), Replicate()))

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (8, 16):
        d = tensor(mesh, shape=(rows, rows))
        found, expected = compiled(d)[0], program(d)[0]
        assert found.shape == expected.shape
        assert torch.equal(found._local_tensor, expected._local_tensor)
        assert found._local_tensor.data_ptr() == d._local_tensor.data_ptr()


def made_inside(d):
    return DTensor.from_local(d.to_local() * 2, d.device_mesh, d.placements)


ALIASES = {
    "two views": lambda d: (lambda y: (y.t(), y[:, 1:3]))(d * 2),
    "one and its view": lambda d: (lambda y: (y, y.t()))(d * 2),
    "views before it": lambda d: (lambda y: (y.t(), y[:, 1:3], y))(d * 2),
    "made from a local tensor, and its view": lambda d: (lambda y: (y, y.t()))(made_inside(d)),
    "made from a local tensor, and that": lambda d: (lambda y: (y, y.to_local()))(made_inside(d)),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ALIASES)
def test_outputs_that_share_what_was_made_inside(mesh, name, requires_grad):
    program = ALIASES[name]
    eager, traced = (tensor(mesh, requires_grad=requires_grad) for _ in range(2))
    expected = program(eager)
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(traced)

    def parts(outputs):
        return [part.to_local() if isinstance(part, DTensor) else part for part in outputs]

    for one, other in zip(parts(expected), parts(found), strict=True):
        assert torch.equal(one, other)
        assert one.requires_grad == other.requires_grad
    assert len({part.untyped_storage().data_ptr() for part in parts(found)}) == 1
    if requires_grad:
        for outputs in (expected, found):
            sum((part * part).sum() for part in parts(outputs)).backward()
        assert torch.equal(eager.grad.to_local(), traced.grad.to_local())


def test_what_is_recorded_can_be_cached():
    way = dtensor_views.Views(
        (dtensor_views.ViewStep("aten::select", "int", (1, 0), (), None),), (16, 8, 16, 4, 8)
    )
    assert pickle.loads(pickle.dumps(way)) == way


def test_an_unknown_way_says_so(mesh):
    d = tensor(mesh)
    with pytest.raises(DTensorError, match=r"Return a copy instead, y\.clone\(\)"):
        dtensor_views.replay(None, d, d[:, 1], False)


def test_a_compiled_function_keeps_its_views_after_disable(mesh):
    import dynamo_dist

    compiled = torch.compile(lambda d: d.t(), backend="aot_eager", fullgraph=True)
    first = compiled(tensor(mesh))
    dynamo_dist.disable()
    assert torch.equal(compiled(tensor(mesh))._local_tensor, first._local_tensor)
    assert isinstance(first, DTensor)


def unsafe_view(d):
    return torch.ops.aten._unsafe_view(d, [8, 16])


@pytest.mark.parametrize("made", [unsafe_view, lambda d: (d * 2).t()])
def test_sizes_that_torch_pickles_wrong_are_not_kept(mesh, made, monkeypatch):
    """torch 2.13 writes freed memory where an ``_unsafe_view`` of a local tensor is pickled."""
    found, upstream = [], dtensor_views._way
    monkeypatch.setattr(
        dtensor_views, "_way", lambda *given: found.append(upstream(*given)) or found[-1]
    )
    with torch.no_grad():
        given = tensor(mesh, (Replicate(), Replicate()))
        # AOTAutograd's program on local tensors: views as functionalization records them.
        got = torch.compile(made, backend=aot_autograd(fw_compiler=make_boxed))(given)
    torch.testing.assert_close(got.to_local(), made(given).to_local())
    assert found and all(
        way is None or not isinstance(way, dtensor_views.LocalViews) for way in found
    )


def make_boxed(module, example_inputs):
    return make_boxed_func(module.forward)
