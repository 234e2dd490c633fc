"""One rank of ``test_accelerate.py``: a training loop of accelerate's, with its DDP and with ours
in the graph.

Each way trains from equal weights on equal batches; losses and weights must be those of the loop in
eager.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import dynamo_dist
import inductor_passes
from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

STEPS, BATCH, WIDTH = 6, 4, 16


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, 3)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def net():
    torch.manual_seed(0)
    return Net()


def train(accelerator, place):
    """Losses over all ranks, weights in full. ``place`` makes of a module the model and its
    parameters.
    """
    model, parameters = place(accelerator, net())
    generator = torch.Generator().manual_seed(1)
    examples = dist.get_world_size() * BATCH * STEPS
    data = TensorDataset(
        torch.randn(examples, WIDTH, generator=generator),
        torch.randint(3, (examples,), generator=generator),
    )
    optimizer, loader = accelerator.prepare(
        torch.optim.AdamW(parameters, lr=0.01), DataLoader(data, BATCH)
    )
    losses = []
    for x, wanted in loader:
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(x), wanted)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather_for_metrics(loss.detach()[None]).mean())
    assert len(losses) == STEPS
    whole = [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in parameters]
    return [torch.stack(losses), *whole]


def prepared(accelerator, module):
    """As accelerate has it: DDP around the module, compiled as its plugin says."""
    parameters = list(module.parameters())
    return accelerator.prepare(module), parameters


def compiled_inside(accelerator, module):
    """DDP around a compiled module: its averages run from hooks, outside of the graph."""
    parameters = list(module.parameters())
    module.compile(backend="dynamo_dist", fullgraph=True)
    return accelerator.prepare(module), parameters


def by_its_plugin_alone():
    """Its DDP, its plugin, and no word of ours but that inductor is to be ours."""
    dynamo_dist.enable(inductor=True)
    return accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor"))


def by_its_plugin():
    options = inductor_passes.options()
    return accelerator(dynamo_plugin=TorchDynamoPlugin(backend="inductor", options=options))


def accelerator(**kwargs):
    """A new one on the process group that there is; without ``cpu`` it would see one process."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, **kwargs)


# Without trackers DDP itself breaks a graph, and inside of it is nothing to launch.
WAYS = {
    "accelerate's plugin while inductor is ours": (by_its_plugin_alone, prepared, False, True),
    "accelerate's plugin with our passes": (by_its_plugin, prepared, True, False),
    "a compiled module in DDP": (accelerator, compiled_inside, False, False),
}
expected = train(accelerator(), prepared)
failed = []
for name, (make, place, has_breaks, has_launches) in WAYS.items():
    torch.compiler.reset()
    counters.clear()
    graphs = {}
    unsubscribe = recorder.subscribe(
        lambda record, graphs=graphs: graphs.update({record.graph_id: record})
    )
    got = train(make(), place)
    unsubscribe()
    dynamo_dist.disable()
    compiled, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    launches = sum(len(graph.collectives) for graph in graphs.values())
    close = [torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(got, expected, strict=True)]
    said = f"{name}: {compiled} graphs, {breaks} breaks, {launches} launches, equal {close}"
    seen = (compiled, breaks > 0, launches > 0)
    if not all(close) or seen != (1, has_breaks, has_launches):
        failed.append(said)
    print(said, flush=True)
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
leave_process(any(verdicts))
