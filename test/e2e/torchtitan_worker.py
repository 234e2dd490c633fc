"""One rank of ``test_torchtitan.py``: torchtitan's Llama-3, two layers of its debug model, eager
and compiled.

Its own ``parallelize`` places the weights (tensor and sequence parallel on pairs of ranks); with
four ranks ``fully_shard`` shares them over the pairs, each with data of its own. Attention is its
``ScaledDotProductAttention``: FlexAttention, which it takes for language models, has no backward on
CPU.
"""

import torch
import torch.distributed as dist
import torchtitan.distributed.parallel_dims as dimensions
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

STEPS, BATCH, LENGTH = 3, 2, 64

dimensions.device_type = "cpu"  # without a GPU it takes CUDA for granted
dist.init_process_group("gloo")
pairs = dist.get_world_size() // 2
dims = dimensions.ParallelDims(
    dp_replicate=pairs,
    dp_shard=1,
    cp=1,
    tp=2,
    pp=1,
    ep=1,
    world_size=dist.get_world_size(),
    spmd_backend="partial_dtensor",
)
mesh = dims.build_mesh()


def model():
    config = model_registry("debugmodel", attn_backend="flex").model
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=True)
    torch.manual_seed(0)
    made = config.build()
    with torch.no_grad():
        made.init_states(buffer_device=torch.device("cpu"))
    made.parallelize(dims)
    return made


def train(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        tokens = torch.randint(2048, (BATCH, LENGTH), generator=generator)
        # The logits are this rank's part of the vocabulary.
        loss = run(tokens, torch.arange(LENGTH).expand(BATCH, -1)).float().logsumexp(-1).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.tensor(losses)


reference = model()
expected = train(reference, reference)
graphs = {}
recorder.subscribe(lambda record: graphs.update({record.graph_id: record}))
ours = model()
if pairs > 1:
    fully_shard(ours, mesh=dims.get_mesh("dp_replicate"))
got = train(ours, torch.compile(ours, backend="dynamo_dist", fullgraph=True))
launches = {graph.phase: len(graph.collectives) for graph in graphs.values()}
close = torch.allclose(got, expected, rtol=1e-5)
compiled = counters["stats"]["unique_graphs"]
said = f"{compiled} graph, launches {launches}, losses {got.tolist()}, equal to eager's: {close}"
print(f"rank {dist.get_rank()}: {said}", flush=True)
failed = [] if close and compiled == 1 and set(launches) == {"forward", "backward"} else [said]
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
leave_process(any(verdicts))
