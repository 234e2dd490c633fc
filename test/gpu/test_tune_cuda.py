"""``tune`` on one GPU with a real NCCL group of one rank: what torch.profiler really writes is read to the end, or a graph is named."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import dynamo_dist
from inductor_passes.attach import measured

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
D = 2048


@pytest.fixture(autouse=True)
def one_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    torch._dynamo.reset()
    yield
    measured.forget()
    dynamo_dist.disable()
    torch._dynamo.reset()
    dist.destroy_process_group()


def layers(x, *weights):
    for w in weights:
        x = torch.relu(x @ fc.all_gather_tensor(w, 0, dist.group.WORLD)) * 0.05
    return x


def step_of(mode=None):
    torch.manual_seed(0)
    inputs = [torch.randn(D, D, device="cuda", requires_grad=True) for _ in range(4)]
    compiled = torch.compile(layers, backend="dynamo_dist", fullgraph=True, mode=mode)

    def step():
        torch.autograd.grad(compiled(*inputs).sum(), inputs)

    return step


def test_a_training_step_is_timed_by_the_profiler():
    report = dynamo_dist.tune(step_of(), steps=9)
    assert report.decision in ("tuned", "put back"), report
    assert not report.left, report
    assert report.before_us > 0 and report.error_after < 0.5, report
    if report.decision == "tuned":
        graphs = [graph for times in measured.adopted().values() for graph in times.graphs.values()]
        assert {graph.phase for graph in graphs} == {"forward", "backward"}
        assert all(launch.us > 0 for graph in graphs for launch in graph.launches.values())
        # A product of 2048 x 2048 takes some 100 us in float32, and no millisecond.
        products = [n.us for graph in graphs for n in graph.nodes.values() if n.product]
        assert products and all(5 < us < 5000 for us in products)


def test_what_a_cuda_graph_replays_is_left_and_named():
    report = dynamo_dist.tune(step_of("reduce-overhead"), steps=3)
    assert report.decision == "left" and "a CUDA graph replays it" in report.why
