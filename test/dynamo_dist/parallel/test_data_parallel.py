"""What the graphs hold, what parameters become, and what is refused; on fake ranks."""

import copy

import expecttest
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from dynamo_dist import data_parallel
from dynamo_dist.errors import DataParallelError

SHOWN = ("mm", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


def training_step(model, x, mesh):
    """One line for each launch and matrix product: the forward graph, then the backward graph, where there is one."""
    lines = []
    names = {mesh.get_group(dim).group_name: dim for dim in mesh.mesh_dim_names}

    def record(name):
        def show(graph, inputs):
            lines.append(f"{name}:")
            for node in graph.graph.nodes:
                if (op := getattr(node.target, "_opname", "")) in SHOWN:
                    value = node.meta["val"]
                    dtype = str(value.dtype).removeprefix("torch.")
                    group = [names[arg] for arg in node.args if arg in names.keys()]
                    lines.append(" ".join([op, str([*value.shape]), dtype, *group]))
            return make_boxed_func(graph.forward)

        return show

    backend = aot_autograd(
        fw_compiler=record("forward"),
        bw_compiler=record("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    loss = torch.compile(model, backend=backend, fullgraph=True)(x).sum()
    if loss.requires_grad:
        loss.backward()
    return "\n".join(lines)


def two_layers():
    return nn.Sequential(nn.Linear(8, 6, bias=False), nn.Linear(6, 8, bias=False))


class TestGraphs(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _on_a_mesh(self, mesh, enabled):
        self.mesh = mesh

    def test_gathered_again_in_backward(self):
        model = data_parallel(two_layers(), self.mesh["tp"])
        self.assertExpectedInline(
            training_step(model, torch.ones(3, 8), self.mesh),
            """\
forward:
all_gather_into_tensor [8, 8] float32 tp
mm [3, 6] float32
all_gather_into_tensor [8, 6] float32 tp
mm [3, 8] float32
backward:
mm [8, 6] float32
all_gather_into_tensor [8, 6] float32 tp
mm [3, 6] float32
reduce_scatter_tensor [2, 6] float32 tp
mm [6, 8] float32
reduce_scatter_tensor [2, 8] float32 tp""",
        )

    def test_kept_for_backward_if_asked(self):
        model = data_parallel(two_layers(), self.mesh["tp"], reshard_after_forward=False)
        self.assertExpectedInline(
            training_step(model, torch.ones(3, 8), self.mesh),
            """\
forward:
all_gather_into_tensor [8, 8] float32 tp
mm [3, 6] float32
all_gather_into_tensor [8, 6] float32 tp
mm [3, 8] float32
backward:
mm [8, 6] float32
mm [3, 6] float32
reduce_scatter_tensor [2, 6] float32 tp
mm [6, 8] float32
reduce_scatter_tensor [2, 8] float32 tp""",
        )

    def test_hybrid_reduces_shards_over_replicas(self):
        model = data_parallel(nn.Linear(8, 8, bias=False), self.mesh, mode="hybrid")
        self.assertExpectedInline(
            training_step(model, torch.ones(3, 8), self.mesh),
            """\
forward:
all_gather_into_tensor [8, 8] float32 tp
mm [3, 8] float32
backward:
mm [8, 8] float32
reduce_scatter_tensor [2, 8] float32 tp
all_reduce [2, 8] float32 dp""",
        )

    def test_replicas_reduce_alone(self):
        model = data_parallel(two_layers(), self.mesh, mode="replicate", dim_names=("dp",))
        self.assertExpectedInline(
            training_step(model, torch.ones(3, 8), self.mesh),
            """\
forward:
mm [3, 6] float32
mm [3, 8] float32
backward:
mm [8, 6] float32
mm [3, 6] float32
all_reduce [8, 6] float32 dp
mm [6, 8] float32
all_reduce [6, 8] float32 dp""",
        )

    def test_gathers_in_one_dtype_and_reduces_in_another(self):
        model = data_parallel(
            nn.Linear(8, 8, bias=False),
            self.mesh["tp"],
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
        )
        self.assertExpectedInline(
            training_step(model, torch.ones(3, 8), self.mesh),
            """\
forward:
all_gather_into_tensor [8, 8] bfloat16 tp
mm [3, 8] bfloat16
backward:
mm [8, 8] bfloat16
reduce_scatter_tensor [2, 8] float32 tp""",
        )
        assert model(torch.ones(3, 8)).dtype == torch.bfloat16
        (param,) = model.parameters()
        assert param.dtype == param.grad.dtype == torch.float32

    @torch.no_grad()
    def test_inference_keeps_nothing_and_gathers_once(self):
        model = data_parallel(nn.Linear(8, 8, bias=False), self.mesh["tp"])
        self.assertExpectedInline(
            training_step(model, torch.ones(3, 8), self.mesh),
            """\
forward:
all_gather_into_tensor [8, 8] float32 tp
mm [3, 8] float32""",
        )

    def test_a_gather_is_one_operator_of_dynamos_graph(self):
        traced = []

        def backend(graph, inputs):
            traced.extend(node.target for node in graph.graph.nodes if node.op[:4] == "call")
            return graph.forward

        model = data_parallel(nn.Linear(8, 8, bias=False), self.mesh["tp"])
        torch.compile(model, backend=backend, fullgraph=True)(torch.ones(3, 8))
        assert traced.count(torch.ops.dynamo_dist_parallel.gather) == 1
        assert len(traced) <= 3  # the parameter's local tensor, its gather, the product


def test_parameters_are_sharded_outside_forward_and_whole_inside(mesh):
    inside = []

    class Linear(nn.Linear):
        def forward(self, x):
            inside.append(self.weight)
            return super().forward(x)

    model = data_parallel(Linear(5, 6), mesh["tp"])
    assert isinstance(model, Linear)
    assert list(model.state_dict()) == ["weight", "bias"]
    assert model.weight is model._parameters["weight"]
    assert model.weight.placements == (Shard(0),) and model.weight.shape == (6, 5)
    assert model.weight.to_local().shape == (2, 5)  # torch.chunk: 2, 2, 2, 0
    nn.init.ones_(model.weight)
    assert model.weight.to_local().eq(1).all()
    model(torch.ones(1, 5))
    assert type(inside[0]) is torch.Tensor and inside[0].shape == (6, 5)
    assert isinstance(model.weight, DTensor)


def test_modules_of_one_class_share_a_class(mesh):
    model = data_parallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), mesh["dp"])
    assert type(model[0]) is type(model[2]) is not nn.Linear
    assert type(model[1]) is nn.ReLU


def test_each_class_has_recompiles_of_its_own(mesh, enabled):
    torch.compiler.reset()
    for at in range(torch._dynamo.config.recompile_limit + 1):
        model = type(f"Layer{at}", (nn.Linear,), {})(8, 8)
        data_parallel(model, mesh["dp"])
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(2, 8))


def test_tensor_parallel_parameters_are_split_further(mesh):
    model = parallelize_module(nn.Linear(4, 16), mesh["tp"], ColwiseParallel())
    data_parallel(model, mesh["dp"])
    assert model.weight.device_mesh.mesh_dim_names == ("dp", "tp")
    assert model.weight.placements == (_StridedShard(0, split_factor=4), Shard(0))
    assert model.weight.to_local().shape == (2, 4)
    assert model.weight.shape == (16, 4)


def test_a_child_keeps_its_own(mesh):
    model = two_layers()
    data_parallel(model[0], mesh["dp"], mode="replicate")
    data_parallel(model, mesh["tp"])
    assert model[0].weight.placements == (Replicate(),)
    assert model[1].weight.placements == (Shard(0),)


def test_meta_parameters_stay_meta(mesh):
    with torch.device("meta"):
        model = two_layers()
    data_parallel(model, mesh["tp"])
    assert all(param.is_meta for param in model.parameters())
    assert model.to_empty(device="cpu")[0].weight.to_local().shape == (2, 8)


@pytest.mark.parametrize("apart", [False, True])
def test_tied_parameters_stay_one(mesh, apart):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    if apart:
        data_parallel(model[0], mesh["dp"])
    data_parallel(model, mesh["dp"])
    assert model[0].weight is model[1].weight
    assert len(list(model.parameters())) == 1
    assert [*model.state_dict()] == ["0.weight", "1.weight"]


def test_a_forward_that_is_an_attribute_of_the_module(mesh, enabled):
    model = nn.Linear(8, 8)
    method = model.forward
    model.forward = lambda x: method(x.bfloat16()) * 2
    data_parallel(model, mesh["dp"], param_dtype=torch.bfloat16)
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        assert call(torch.ones(2, 8)).dtype == torch.bfloat16


def test_local_tensors_that_a_forward_puts_in_place_of_its_parameters(mesh, enabled):
    class Local(nn.Linear):
        def forward(self, x):
            before = dict(self.named_parameters(recurse=False))
            self._parameters.update({name: p.to_local() for name, p in before.items()})
            try:
                assert not isinstance(self.weight, DTensor)
                return super().forward(x)
            finally:
                self._parameters.update(before)

    model = parallelize_module(Local(8, 8), mesh["tp"], ColwiseParallel())
    rows = model.weight.to_local().shape[0]
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    data_parallel(model, mesh["dp"])
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        out = call(torch.ones(2, 8))
        assert out.shape == (2, rows)
        out.sum().backward()
    assert model.weight.grad.placements == model.weight.placements


def refused(call, what):
    with pytest.raises(DataParallelError, match=what):
        call()


def test_what_is_refused_leaves_the_module_as_it_was(mesh):
    tied, other = two_layers(), nn.Linear(8, 6, bias=False)
    other.weight = tied[0].weight
    data_parallel(tied, mesh["dp"])
    refused(
        lambda: data_parallel(other, mesh["tp"]), "is shared with a module that is data parallel"
    )
    assert type(other) is nn.Linear

    model = two_layers()
    refused(lambda: data_parallel(model, mesh), "takes a mesh of 1 dimensions")
    refused(lambda: data_parallel(model, mesh["dp"], mode="hybrid"), "takes a mesh of 2 dimensions")
    refused(lambda: data_parallel(model, mesh, dim_names=("data",)), "no dimension 'data'")
    refused(lambda: data_parallel(model, mesh["dp"], mode="shard"), "'fully_shard', 'hybrid'")
    assert not isinstance(model[0].weight, DTensor)

    data_parallel(model, mesh["dp"])
    refused(lambda: data_parallel(model, mesh["dp"]), "data parallel already")

    distributed = parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel())
    refused(lambda: data_parallel(distributed, mesh["tp"]), "already a DTensor on")
    pending = nn.Linear(4, 4)
    pending.weight = nn.Parameter(
        DTensor.from_local(pending.weight.detach(), mesh["tp"], [Partial()])
    )
    refused(lambda: data_parallel(pending, mesh["dp"]), "pending sum|placements")
    refused(
        lambda: data_parallel(
            parallelize_module(nn.Linear(4, 12), mesh["tp"], ColwiseParallel()), mesh["dp"]
        ),
        "3 rows per tensor parallel rank, which 2",
    )
    wrapped = fully_shard(nn.Linear(4, 4), mesh=mesh["dp"])
    refused(lambda: data_parallel(wrapped, mesh["dp"]), "wrapped by FSDPLinear already")


def test_one_number_is_held_by_all(mesh):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale

    model = data_parallel(Scaled(), mesh["dp"])
    assert model.scale.placements == (Replicate(),)
    model(torch.ones(3)).sum().backward()
    assert model.scale.grad.to_local() == 3 / 2  # a fake sum over two ranks is one rank's value
    refused(lambda: data_parallel(Scaled(), mesh, mode="hybrid"), "no dimension to shard")


def blocks():
    torch.manual_seed(0)
    one = (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    return nn.Sequential(*(nn.Sequential(*copy.deepcopy(one)) for _ in range(3)))


def storage_bytes(tensors):
    """Bytes of the storages behind ``tensors``, each once; those that are freed hold none."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def local_tensors(parameters):
    return [p.to_local() for p in parameters]


def test_no_more_is_held_than_by_fully_shard(mesh, enabled):
    """Parameters, gradients, and what forward keeps for backward; of real tensors on fake ranks."""
    x = torch.randn(128, 64)
    theirs, seen = blocks(), []
    for block in theirs:
        fully_shard(block, mesh=mesh["tp"])
    fully_shard(theirs, mesh=mesh["tp"])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        loss = theirs(x).sum()
    held = {t.untyped_storage()._cdata for t in local_tensors(theirs.parameters())} | {
        x.untyped_storage()._cdata
    }
    kept = storage_bytes([t for t in seen if t.untyped_storage()._cdata not in held])
    loss.backward()

    ours, kept_by_ours = data_parallel(blocks(), mesh["tp"]), []

    def forward(graph, inputs):
        (returned,) = graph.graph.find_nodes(op="output")
        values = [n.meta["val"] for n in returned.args[0][1:] if n.op != "placeholder"]
        kept_by_ours.append(sum(v.nbytes for v in values if isinstance(v, torch.Tensor)))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(ours, backend=backend, fullgraph=True)(x).sum().backward()
    assert 0 < kept_by_ours[0] <= 1.05 * kept
    for pick in (lambda p: p, lambda p: p.grad):
        mine, others = (
            storage_bytes(local_tensors(map(pick, each.parameters()))) for each in (ours, theirs)
        )
        assert 0 < mine <= 1.05 * others


def test_checkpointed_gathers_need_no_advice(mesh, enabled, caplog):
    if cached := getattr(torch._logging, "warning_once", None):
        cached.cache_clear()  # it warns once a process
    model = data_parallel(two_layers(), mesh["tp"])
    training_step(model, torch.ones(3, 8), mesh)
    assert "context_fn is passed" not in caplog.text
