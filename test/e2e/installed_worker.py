"""One rank of ``test_installed.py``: programs that say ``torch.compile(model)``, by upstream and
with the passes installed.

Kernels are Python (``test/support/fuzzing/without_cpp.py``), but for FlexAttention's, which is a
template in C++.
"""

import contextlib
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import flex_attention

import dynamo_dist
import inductor_passes
from inductor_passes.report.recorder import records_of_block
from inductor_passes.testing import leave_process

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzzing.without_cpp import without_cpp

WIDTH, ROWS, STEPS = 16, 8, 3

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


@contextlib.contextmanager
def installed(**options):
    inductor_passes.install(options)
    try:
        yield
    finally:
        inductor_passes.uninstall()
        torch.compiler.reset()


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def model():
    torch.manual_seed(0)
    made = nn.Sequential(Block(), Block())
    for block in made:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return made


def train(model, run):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        loss = run(drawn(ROWS, WIDTH, seed=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return [torch.stack(losses), *(p.detach() for p in whole)]


def close(found, expected):
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def by_eager():
    reference = model()
    return train(reference, reference)


def upstream_trains_and_no_pass_runs():
    ours = model()
    with records_of_block() as found:
        close(train(ours, torch.compile(ours)), by_eager())
    assert found == []


def whole_model_trains(passes=installed):
    ours = model()
    with passes(), records_of_block() as found:
        fast = torch.compile(ours, backend="inductor", fullgraph=True)
        close(train(ours, fast), by_eager())
    seen = [(g.phase, g.order_kept, g.cache, [p.name for p in g.passes]) for g in found]
    assert {graph.phase for graph in found} == {"forward", "backward"}, seen
    assert all(graph.order_kept for graph in found), seen
    assert all(any(p.name == "schedule" for p in graph.passes) for graph in found), seen


def whole_model_trains_with_the_plugin():
    whole_model_trains(lambda: dynamo_dist.enabled(inductor=True))


def regions_compiled_in_place_train():
    """As torchtitan compiles: each block by itself, with Inductor's options."""
    ours = model()
    with installed(), records_of_block() as found:
        for block in ours:
            block.compile(backend="inductor", fullgraph=True, options={"max_autotune": False})
        close(train(ours, ours), by_eager())
    assert {graph.phase for graph in found} == {"forward", "backward"}
    assert all(graph.order_kept and len(graph.collectives) == 1 for graph in found)


def fully_sharded_blocks_train():
    """FSDP2: what is compiled after it was sharded gathers and reduces in its graphs."""

    def made():
        torch.manual_seed(0)
        blocks = nn.Sequential(Block(), Block())
        for block in blocks:
            fully_shard(block, mesh=mesh)
        return blocks

    reference, ours = made(), made()
    with dynamo_dist.enabled(inductor=True), records_of_block() as found:
        for block in ours:
            block.compile(fullgraph=True)
        close(train(ours, ours), train(reference, reference))
    assert {graph.phase for graph in found if graph.collectives} == {"forward", "backward"}


def lengths(x, w, v):
    """Two gathers and a sum over ranks, whose best order depends on the length of the batch."""
    # Newer torch has another name for it.
    gather = getattr(fc, "all_gather_single", None) or fc.all_gather_tensor
    whole = gather(w, 0, mesh.get_group())
    other = fc.all_reduce(v, "sum", mesh.get_group())
    return (x @ x.t()) @ (x @ whole), other * 2, (x @ other).sum(0)


def ranks_of_other_lengths():
    """Rank 1 has another batch in each call and compiles more often than rank 0."""
    w, v = drawn(WIDTH // 2, WIDTH, seed=rank), drawn(WIDTH, WIDTH, seed=2 + rank)
    with installed(), records_of_block() as found:
        fast = torch.compile(lengths)
        for call in range(4):
            x = drawn(8 if rank == 0 else 12 + 4 * call, WIDTH, seed=10 * call + rank)
            close(fast(x, w, v), lengths(x, w, v))
    compiled = of_all_ranks([[c.kind for c in graph.collectives] for graph in found])
    assert len(compiled[0]) == 1 and len(compiled[1]) == 2, compiled
    launch_alike(found)


def of_all_ranks(mine):
    found = [None, None]
    dist.all_gather_object(found, mine)
    return found


def launch_alike(graphs):
    """All graphs of all ranks have one order of launches."""
    mine = {tuple(e for e in graph.order if e.startswith("launch")) for graph in graphs}
    one, other = of_all_ranks(mine)
    assert len(one | other) == 1, (one, other)


def pass_lists_on_ranks_of_other_lengths():
    """Graphs that Dynamo has not made, each rank's of another length, as another compiler hands
    them over.
    """
    w, v = drawn(WIDTH // 2, WIDTH, seed=rank), drawn(WIDTH, WIDTH, seed=2 + rank)
    with records_of_block() as found:
        for call in range(2):
            x = drawn(8 + 40 * rank + call, WIDTH, seed=rank)
            gm = make_fx(lengths, tracing_mode="fake")(x, w, v)
            close(inductor_passes.communication_pass(gm, [x, w, v])(x, w, v), lengths(x, w, v))
    assert [graph.graph_id for graph in found] == ["fx0:inference", "fx1:inference"], found
    launch_alike(found)


def caches_mix_nothing():
    x, w, v = (
        drawn(ROWS, WIDTH, seed=1),
        drawn(WIDTH // 2, WIDTH, seed=2),
        drawn(WIDTH, WIDTH, seed=3),
    )

    def plain(x):
        return torch.relu(x @ x.t()) * 3

    def hits(program, *inputs):
        torch.compiler.reset()
        counters.clear()
        torch.compile(program)(*inputs)
        return counters["aot_autograd"]["autograd_cache_hit"]

    seen = []
    with fresh_cache():
        for passes in (nullcontext, installed, nullcontext, installed):
            with passes():
                seen.append((hits(lengths, x, w, v), hits(plain, x)))
    assert seen == [(0, 0), (0, 1), (1, 1), (1, 1)], seen


def attention(q, w):
    scores = flex_attention(
        q, q + 1, q * 2, score_mod=lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf"))
    )
    return fc.all_reduce(scores @ w, "sum", mesh.get_group())


def flex_attention_beside_a_launch():
    q, w = drawn(1, 2, 128, WIDTH, seed=rank), drawn(WIDTH, WIDTH, seed=5)
    with torch.no_grad(), installed(), records_of_block() as found:
        close([torch.compile(attention, fullgraph=True)(q, w)], [attention(q, w)])
    assert [len(graph.collectives) for graph in found] == [1]
    assert found[0].order_kept


IN_PYTHON = [
    upstream_trains_and_no_pass_runs,
    whole_model_trains,
    whole_model_trains_with_the_plugin,
    regions_compiled_in_place_train,
    fully_sharded_blocks_train,
    ranks_of_other_lengths,
    pass_lists_on_ranks_of_other_lengths,
    caches_mix_nothing,
]


def main():
    failed = False
    for scenario in [*IN_PYTHON, flex_attention_beside_a_launch]:
        if len(sys.argv) > 1 and scenario.__name__ not in sys.argv[1:]:
            continue
        torch.compiler.reset()
        try:
            with without_cpp() if scenario in IN_PYTHON else nullcontext():
                scenario()
        except Exception as error:
            failed = True
            print(f"rank {rank}: {scenario.__name__}: {type(error).__name__}: {error}", flush=True)
        dist.barrier()
    leave_process(failed)


main()
