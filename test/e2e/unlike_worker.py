"""One rank of ``test_unlike_ranks.py``: programs whose ranks hold, compile or keep something else than others.

Each function of ``CASES`` runs as a job of its own and returns "ok" or what is wrong; all are right in eager
mode. What a rank found is written to ``<rank>.json`` in the folder of the first argument after each case.
Inductor lowers and generates as always, but the kernels are Python (``tools/fuzzing/without_cpp.py``).
"""

import contextlib
import copy
import functools
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import dynamo_dist
from inductor_passes.reporting import recorder
from inductor_passes.testing import leave_process

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from fuzzing.without_cpp import without_cpp

WIDTH = 32
log = logging.getLogger("program")


def drawn(*shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype) / shape[-1] ** 0.5


def compiled(function, **settings):
    return torch.compile(function, backend="dynamo_dist", **settings)


def compare(step, calls, **settings):
    """``step(*inputs)`` for each of ``calls``, eager and compiled."""
    fast = compiled(step, **settings)
    for number, inputs in enumerate(calls):
        expected = step(*inputs)
        with contextlib.redirect_stdout(io.StringIO()):
            found = fast(*inputs)
        for at, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            if not torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5):
                return f"call {number}, output {at} is off by {(mine - theirs).abs().max():.3g}"
    return "ok"


# --- Local sizes ------------------------------------------------------------------------------------


def mlp(depth, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers)


def against_ddp(
    rank,
    batches,
    depth=2,
    accumulate=1,
    evaluate=False,
    mode="replicate",
    rate=0.1,
    model=None,
    before=lambda step: None,
):
    """``batches``: (rows, rows, ...) of each step, by rank. Losses and parameters as DDP's, eager."""
    model = mlp(depth) if model is None else model
    reference = DistributedDataParallel(copy.deepcopy(model))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ours = dynamo_dist.data_parallel(model, mesh["dp"], mode=mode)
    fast = compiled(ours)
    pairs = [(each, torch.optim.SGD(each.parameters(), rate)) for each in (reference, ours)]
    for step, rows in enumerate(batches):
        before(step)
        x = drawn(rows[rank], WIDTH, seed=10 * step + rank)
        losses = []
        for forward, (_, optimizer) in zip((reference, fast), pairs, strict=True):
            loss = (forward(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
            return f"step {step}: loss {losses[1]}, with DDP {losses[0]}"
        if evaluate and rank == 0 and step % 10 == 3:
            with torch.no_grad():  # nothing is launched: each rank has the whole model
                one, other = fast(x[:3]), reference.module(x[:3])
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                return f"step {step}: evaluation is off by {(one - other).abs().max():.3g}"
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        if not torch.allclose(mine.full_tensor(), theirs, rtol=1e-3, atol=1e-5):
            return "parameters differ from DDP's"
    return "ok"


def data_parallel(rank):
    return against_ddp(rank, [(16, 16), (24, 16)], depth=8)


def data_set(rank, left=(16, 7), **settings):
    """Five epochs of ten steps, the last of which has what is ``left`` of the data: less on rank 1."""
    epoch = [(16, 16)] * 9 + [left]
    return against_ddp(rank, epoch * 5, **settings)


def data_set_last_batch_short(rank):
    return data_set(rank)


def data_set_sharded(rank):
    return data_set(rank, left=(7, 5), mode="fully_shard")


def data_set_accumulated(rank):
    return data_set(rank, accumulate=2)


def data_set_evaluated_on_rank_0(rank):
    return data_set(rank, evaluate=True)


def data_set_in_buckets(rank):
    """Each rank draws a bucket of lengths for itself."""
    lengths = [(8, 24, 64)[at] for at in torch.randint(3, (100,), generator=torch.manual_seed(3))]
    return against_ddp(rank, [tuple(lengths[2 * at : 2 * at + 2]) for at in range(50)])


def two_gathers(rank):
    """Which gather goes first pays off differently for long and for short batches."""
    a, b = (drawn(WIDTH // 2, WIDTH, seed=rank + at, dtype=d) for at, d in DTYPES)
    w, v = (drawn(WIDTH, WIDTH, seed=8 + at, dtype=d) for at, d in DTYPES)

    def step(x, y):
        whole = fc.all_gather_tensor(a, 0, dist.group.WORLD)
        other = fc.all_gather_tensor(b, 0, dist.group.WORLD)
        return x @ whole @ w @ w @ w, y @ other @ v @ v @ v

    short = (drawn(4, WIDTH, seed=3), drawn(4, WIDTH, seed=4, dtype=torch.float64))
    long = (drawn(40000, WIDTH, seed=3), short[1])
    calls = [short, long, (short, long)[rank], short, (long, short)[rank]]
    return compare(step, calls, dynamic=False)


DTYPES = ((0, torch.float32), (1, torch.float64))


def six_reduces(rank):
    """How many of the sums go together depends on what could hide them."""
    w = drawn(WIDTH, WIDTH, seed=1)

    def step(x):
        sums = []
        for _ in range(6):
            x = torch.tanh(x @ w)
            sums.append(fc.all_reduce(x.mean(0), "sum", dist.group.WORLD) * 2)
        return (x, *sums)

    short, long = drawn(4, WIDTH, seed=2), drawn(20000, WIDTH, seed=2)
    return compare(step, [(short, long)[rank : rank + 1], (short,), (long,)], dynamic=False)


def unequal_from_the_first_step(rank):
    """Through DTensors, and over a group of its own: what six_reduces shows, another way."""
    mesh = init_device_mesh("cpu", (2,))
    shards = [drawn(WIDTH // 2, WIDTH, seed=20 + 2 * at + rank) for at in range(4)]

    def step(x):
        sums = []
        for shard in shards:
            whole = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
            x = torch.relu(x @ whole.redistribute(placements=[Replicate()]).to_local())
            part = DTensor.from_local(x.mean(0), mesh, [Partial()], run_check=False)
            sums.append(part.redistribute(placements=[Replicate()]).to_local() * 1)
        return (x, *sums)

    rows = [(3000, 4), (4, 4), (4, 3000), (12, 8)]
    return compare(step, [(drawn(each[rank], WIDTH, seed=5),) for each in rows])


# --- Graphs that one rank alone has -----------------------------------------------------------------


def gather_then_reduce(between=lambda y: None):
    w = drawn(WIDTH // 2, WIDTH, seed=1)

    def step(x):
        whole = fc.all_gather_tensor(w, 0, dist.group.WORLD)
        y = torch.relu(x @ whole)
        between(y)
        total = fc.all_reduce(y.mean(0) * 2, "sum", dist.group.WORLD)
        return y @ whole, total + 1

    return step


def batch(rows=8):
    return (drawn(rows, WIDTH, seed=6),)


def metrics_on_rank_0(rank):
    @torch.compile(backend="dynamo_dist")
    def metrics(x):
        return torch.relu(x).mean()

    if rank == 0:
        metrics(*batch())
    return compare(gather_then_reduce(), [batch()] * 2)


def metrics_on_rank_0_between_steps(rank):
    @torch.compile(backend="dynamo_dist")
    def metrics(x):
        return torch.relu(x).mean()

    step = gather_then_reduce()
    fast = compiled(step)
    for rows in (8, 12, 16):
        if not all(map(torch.allclose, fast(*batch(rows)), step(*batch(rows)))):
            return f"{rows} rows: numbers differ"
        if rank == 0:
            metrics(*batch(rows))
    return "ok"


def print_on_rank_0(rank):
    def between(y):
        if dist.get_rank() == 0:
            print("mean", y.mean().item())

    return compare(gather_then_reduce(between), [batch()] * 3)


def print_on_rank_1_of_a_backward(rank):
    """The break splits a graph that has a backward, whose launches are split with it."""
    model = mlp(4)
    mesh = init_device_mesh("cpu", (2,))
    dynamo_dist.data_parallel(model, mesh, mode="replicate")
    reference = DistributedDataParallel(mlp(4))

    def forward(x):
        y = model[1](model[0](x))
        if rank == 1:
            print("half of it")
        return model[3](model[2](y))

    fast = compiled(forward)
    for _ in range(3):
        x = drawn(8, WIDTH, seed=rank)
        with contextlib.redirect_stdout(io.StringIO()):
            fast(x).square().mean().backward()
        reference(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if not torch.allclose(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-6):
            return "gradients differ from DDP's"
    return "ok"


def sums_around_a_loop(loud):
    """Launches that are merged, and a loop behind whose breaks Dynamo cannot go on: Python runs the whole function."""
    parts = [drawn(rows, WIDTH, seed=rows) for rows in (2, 4, 6)]

    def step(x, turn):
        sums = [fc.all_reduce(part * 2, "sum", dist.group.WORLD) for part in parts]
        for part in parts:
            x = torch.relu(x + part.mean(0))
            if loud(turn):
                print("layer")
        return *[each * 1.0 for each in sums], x, fc.all_reduce(x.mean(0), "sum", dist.group.WORLD)

    return step


def print_on_rank_0_in_a_loop(rank):
    step = sums_around_a_loop(lambda turn: rank == 0 and turn < 2)
    return compare(step, [(*batch(), turn) for turn in range(4)])


def print_in_a_loop_later(rank):
    step = sums_around_a_loop(lambda turn: turn == 2)
    return compare(step, [(*batch(), turn) for turn in range(4)])


def gathers_behind_python(rank):
    """What is compiled by itself where Python calls it stands in other functions too, in an order of their own."""
    parts = [drawn(rows, WIDTH, seed=rows) for rows in (2, 4, 6)]

    def gathered(part):
        return fc.all_gather_tensor(part * 2, 0, dist.group.WORLD)

    def merged(x):
        for out in [gathered(part) for part in parts]:
            x = torch.relu(x + out.mean(0))
        return (x,)

    def step(x):
        total = x.mean(0)
        sum_ = dist.all_reduce(total, async_op=True)
        out = gathered(parts[0])
        for part in parts:
            x = torch.relu(x + part.mean(0))
            if rank == 1:
                print("part")
        sum_.wait()
        return x + total, out * 1.0

    with recorder.records_of_block() as records:
        word = compare(merged, [batch()])
    if word == "ok" and not any(
        p.name == "merge_tiny" and p.changed for r in records for p in r.passes
    ):
        return "nothing was merged"
    return compare(step, [batch()]) if word == "ok" else word


class Layers(nn.Module):
    """Calls its layers in a loop, and says so on one rank."""

    def __init__(self, layers, loud):
        super().__init__()
        self.layers, self.loud = layers, loud

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if self.loud:
                print("layer")
        return x


def print_in_a_loop_over_layers(rank, **settings):
    """One rank compiles the model, the other each of its layers, and both train."""
    model = Layers(mlp(3), loud=rank == 1)
    with contextlib.redirect_stdout(io.StringIO()):
        return against_ddp(rank, [(8, 8), (8, 6), (8, 8)], model=model, **settings)


def print_in_a_loop_over_sharded_layers(rank):
    return print_in_a_loop_over_layers(rank, mode="fully_shard")


def print_in_a_loop_at_first(rank):
    """Whoever compiles again for another length meets no break then, and its peers, who do not, go on with theirs."""
    model = Layers(mlp(3), loud=True)

    def before(step):
        model.loud = step == 0
        if rank == 0 and step == 3:
            torch._dynamo.reset()

    batches = [(8, 8), (8, 6), (8, 7), (8, 8), (6, 8)]
    with contextlib.redirect_stdout(io.StringIO()):
        return against_ddp(rank, batches, model=model, before=before)


def equal_sums(loud):
    """A word, and whether one launch serves for two equal ones."""
    part, x = drawn(4, WIDTH, seed=1), batch()[0].requires_grad_()

    def step(x, loud):
        one = fc.all_reduce(part.mean(0), "sum", dist.group.WORLD)
        for turn in range(2):
            x = torch.relu(x + one)
            if loud:
                print("turn", turn)
        return x, x * fc.all_reduce(part.mean(0), "sum", dist.group.WORLD)

    with recorder.records_of_block() as records:
        word = compare(step, [(x, loud)])
    return word, any(p.name == "share_launches" and p.changed for r in records for p in r.passes)


def equal_sums_are_one(rank):
    word, shared = equal_sums(loud=False)
    return word if shared else f"{word}, launched twice"


def equal_sums_beside_python(rank):
    """A rank that Python runs launches equal ones one by one, and so does its peer."""
    word, _ = equal_sums(loud=rank == 0)
    return word


def dynamic_on_rank_1(rank):
    """With symbolic sizes a backward graph is compiled with its forward one, before either of them launches."""
    mesh = init_device_mesh("cpu", (2,))
    weight = drawn(WIDTH // 2, WIDTH, seed=rank).requires_grad_()

    def loss(x):
        own = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
        whole = own.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return torch.relu(x @ whole).square().sum()

    fast, grads = compiled(loss, dynamic=True if rank else None), []
    for function in (loss, fast):
        weight.grad = None
        function(*batch(8 + 4 * rank)).backward()
        grads.append(weight.grad)
    return "ok" if torch.allclose(*grads, rtol=1e-4, atol=1e-5) else "gradients differ"


def log_without_collective(rank):
    @torch.compile(backend="dynamo_dist")
    def prepare(x):
        y = x * 2
        if dist.get_rank() == 0:
            log.info("prepared")
        return y.sin()

    prepare(*batch())
    return compare(gather_then_reduce(), [batch()] * 2)


def forgotten_on_rank_1(rank):
    """One rank compiles again what its peers have compiled."""
    step = gather_then_reduce()
    said = compare(step, [batch()] * 2)
    if rank == 1:
        torch._dynamo.reset()
    return said if said != "ok" else compare(step, [batch(), batch(12), batch(16)])


# --- Restarts ---------------------------------------------------------------------------------------


def survivor_of_a_restart(rank):
    """Rank 0 stays as it is, rank 1 is a new process; Dynamo has compiled the function in one of them alone."""
    said = compare(gather_then_reduce(), [batch()])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        said = said if said != "ok" else second_attempt(0, job_store(0, first=True))
    else:
        command = [sys.executable, __file__, "--second-attempt"]
        done = subprocess.run(command, capture_output=True, text=True)
        said = said if said != "ok" else (done.stdout.strip() or done.stderr[-2000:])
    own = dist.PrefixStore("after the restart", job_store(rank, first=rank == 0))
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
    return said


def second_attempt(rank, store):
    own = dist.PrefixStore("second attempt", store)
    dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
    said = compare(gather_then_reduce(), [batch(), batch(12)])
    dist.barrier()
    dist.destroy_process_group()
    return said


@functools.cache
def job_store(rank, first=False):
    """What the job's ranks share as long as it runs, through all restarts."""
    port, wait = int(os.environ["MASTER_PORT"]), timedelta(seconds=600)
    return dist.TCPStore("127.0.0.1", port, is_master=first, timeout=wait, wait_for_workers=False)


# --- Caches -----------------------------------------------------------------------------------------


def cache_folder(rank, shared=False):
    folder = Path(os.environ["CASE_FOLDER"]) / ("shared" if shared else f"cache{rank}")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    return folder


def kept_files(folder):
    """What this package keeps beside Inductor's cache, if it does."""
    return [each for each in (folder / "inductor_passes").rglob("*") if each.is_file()]


def warm_start_without(rank, harm, on):
    folder = cache_folder(rank)
    step = gather_then_reduce()
    said = compare(step, [batch()])
    dist.barrier()
    torch._dynamo.reset()
    if rank in on:
        for file in kept_files(folder):
            harm(file)
    dist.barrier()
    return said if said != "ok" else compare(step, [batch()] * 2)


def record_lost_on_rank_0(rank):
    return warm_start_without(rank, Path.unlink, (0,))


def records_lost(rank):
    return warm_start_without(rank, Path.unlink, (0, 1))


def record_damaged_on_rank_1(rank):
    return warm_start_without(rank, lambda file: file.write_text('{"passes": [1]}'), (1,))


def records_of_nothing(rank):
    return warm_start_without(rank, lambda file: file.write_text("[]"), (0, 1))


def record_too_deep(rank):
    return warm_start_without(rank, lambda file: file.write_text("[" * 100_000), (0,))


def by_turns(rank, step, *inputs):
    """Rank 1 starts once rank 0 has compiled and run, with the same cache; returns its own result of both."""
    cache_folder(rank, shared=True)
    for turn in range(2):
        if turn == rank:
            found = compiled(step)(*inputs)
        dist.barrier()
    return found, step(*inputs)


def rows_of(rank, step, *inputs):
    found, expected = by_turns(rank, step, *inputs)
    if not torch.equal(found.to_local(), expected.to_local()):
        return f"rank {rank} has {found.to_local().tolist()}, not {expected.to_local().tolist()}"
    return "ok"


def whole_and_shard(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Replicate()])
    return whole, distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])


def coordinate_of_a_slice(rank):
    whole, _ = whole_and_shard(rank)
    return rows_of(rank, lambda s: s.redistribute(placements=[Shard(0)]) * 2, whole)


def coordinate_of_an_operand(rank):
    whole, shard = whole_and_shard(rank)
    return rows_of(rank, lambda x, s: x + s, shard, whole)


def coordinate_of_an_index(rank):
    """Rows are added to columns in shards: each rank adds its own columns of what all have."""
    mesh = init_device_mesh("cpu", (2,))
    columns = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    index = distribute_tensor(torch.tensor([0, 3, 1]), mesh, [Replicate()])
    source = distribute_tensor(torch.arange(18.0).reshape(3, 6), mesh, [Replicate()])
    return rows_of(rank, lambda x, i, s: torch.index_add(x, 0, i, s), columns, index, source)


def coordinate_in_a_backward(rank):
    """The gradient of a gather is this rank's slice."""
    _, shard = whole_and_shard(rank)
    weight = torch.arange(8.0).reshape(4, 2)

    def step(x):
        x = x.detach().requires_grad_()
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return torch.autograd.grad((whole * weight).sum(), x)[0]

    cache_folder(rank, shared=True)

    def forward(x):
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return (whole * weight).sum()

    fast, x = compiled(forward), shard.detach().requires_grad_()
    loss = fast(x)
    expected = step(shard)
    for turn in range(2):
        if turn == rank:
            loss.backward()
        dist.barrier()
    same = torch.equal(x.grad.to_local(), expected.to_local())
    return "ok" if same else f"rank {rank} has {x.grad.to_local()}, not {expected.to_local()}"


CASES = {
    each.__name__: each
    for each in (
        data_parallel,
        two_gathers,
        six_reduces,
        unequal_from_the_first_step,
        metrics_on_rank_0,
        metrics_on_rank_0_between_steps,
        print_on_rank_0,
        print_on_rank_1_of_a_backward,
        print_on_rank_0_in_a_loop,
        print_in_a_loop_later,
        gathers_behind_python,
        print_in_a_loop_over_layers,
        print_in_a_loop_over_sharded_layers,
        print_in_a_loop_at_first,
        equal_sums_are_one,
        equal_sums_beside_python,
        dynamic_on_rank_1,
        log_without_collective,
        forgotten_on_rank_1,
        survivor_of_a_restart,
        record_lost_on_rank_0,
        records_lost,
        record_damaged_on_rank_1,
        records_of_nothing,
        record_too_deep,
        coordinate_of_a_slice,
        coordinate_of_an_operand,
        coordinate_of_an_index,
        coordinate_in_a_backward,
        data_set_last_batch_short,
        data_set_sharded,
        data_set_in_buckets,
        data_set_accumulated,
        data_set_evaluated_on_rank_0,
    )
}


def main():
    folder, *cases = sys.argv[1:]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if folder == "--second-attempt":
        with without_cpp(), contextlib.redirect_stdout(io.StringIO()):
            said = second_attempt(rank, job_store(rank))
        print(said)
        leave_process()
    store = job_store(rank, first=rank == 0)
    results = {}
    with without_cpp():
        for case in cases:
            torch._dynamo.reset()
            os.environ["CASE_FOLDER"] = str(Path(folder, case))
            cache_folder(rank)
            own = dist.PrefixStore(case, store)
            dist.init_process_group("gloo", store=own, rank=rank, world_size=2)
            try:
                results[case] = CASES[case](rank)
            except Exception:
                results[case] = traceback.format_exc()
            whole = Path(folder, f"{rank}.part")
            whole.write_text(json.dumps(results))
            whole.replace(Path(folder, f"{rank}.json"))
            if results[case] != "ok":
                break  # who knows where the other rank is now
            dist.barrier()
            dist.destroy_process_group()
    leave_process()


if __name__ == "__main__":
    main()
