"""One rank of ``test_unlike_ranks.py``: programs whose ranks hold, compile or keep something else
than others.

Each function of ``CASES`` runs as a job of its own and returns "ok" or what is wrong; all are right
in eager mode. What a rank found is written to ``<rank>.json`` in the folder of the first argument
after each case. Inductor lowers and generates as always, but the kernels are Python
(``test/support/fuzzing/without_cpp.py``).
"""

import contextlib
import io
import json
import logging
import os
import subprocess
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import unlike_caches
import unlike_data_parallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from unlike_base import (
    WIDTH,
    batch,
    cache_folder,
    compare,
    compiled,
    drawn,
    gather_then_reduce,
    job_store,
)
from unlike_data_parallel import against_ddp, mlp

from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from fuzzing.without_cpp import without_cpp

log = logging.getLogger("program")

# --- Local sizes
# ------------------------------------------------------------------------------------


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


# --- Graphs that one rank alone has
# -----------------------------------------------------------------


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
    shards = [drawn(WIDTH // 2, WIDTH, seed=4 * rank + i).requires_grad_() for i in range(4)]

    def layer(number, x):
        return torch.relu(x @ fc.all_gather_tensor_autograd(shards[number], 0, dist.group.WORLD))

    def loss(x):
        y = layer(1, layer(0, x))
        if rank == 1:
            print("half of it")
        return layer(3, layer(2, y)).square().sum()

    fast, grads = compiled(loss), []
    for function in (loss, fast):
        for step in range(3):
            with contextlib.redirect_stdout(io.StringIO()):
                function(drawn(8, WIDTH, seed=step)).backward()
        grads.append([shard.grad for shard in shards])
        for shard in shards:
            shard.grad = None
    for mine, theirs in zip(*grads, strict=True):
        if not torch.allclose(mine, theirs, rtol=1e-3, atol=1e-6):
            return "gradients differ from eager's"
    return "ok"


def sums_around_a_loop(loud):
    """Launches that are merged, and a loop behind whose breaks Dynamo cannot go on: Python runs
    the whole function.
    """
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
    """What is compiled by itself where Python calls it stands in other functions too, in an
    order of their own.
    """
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
    return print_in_a_loop_over_layers(rank, wrap=fully_shard)


def print_in_a_loop_at_first(rank):
    """Whoever compiles again for another length meets no break then, and its peers, who do not,
    go on with theirs.
    """
    model = Layers(mlp(3), loud=True)

    def before(step):
        model.loud = step == 0
        if rank == 0 and step == 3:
            torch._dynamo.reset()

    batches = [(8, 8), (8, 6), (8, 7), (8, 8), (6, 8)]
    with contextlib.redirect_stdout(io.StringIO()):
        return against_ddp(rank, batches, model=model, before=before)


def print_on_rank_0_in_a_manager(rank):
    """A context manager that launches, used by a function that stays in Python and by one that
    is compiled.
    """
    parts = [drawn(rows, WIDTH, seed=rows) for rows in (2, 4, 6)]
    loud = [rank == 0]

    @contextlib.contextmanager
    def summed(x):
        total = fc.all_reduce(x.mean(0), "sum", dist.group.WORLD)
        if loud[0]:
            print("before")
        yield total
        total.add_(fc.all_reduce(x.sum(0), "sum", dist.group.WORLD))

    def in_a_loop(x):
        for part in parts:
            with summed(x * part.mean(0)) as total:
                x = torch.relu(x + part.mean(0))
                if rank == 0:
                    print("part")
            x = x + total
        return (x,)

    def once(x):
        sums = [fc.all_reduce(part * 2, "sum", dist.group.WORLD) for part in parts]
        with summed(x) as total:
            x = torch.relu(x + 1)
        return *[each * 1.0 for each in sums], x + total

    word = compare(in_a_loop, [batch()] * 2)
    if word == "ok":
        word = compare(once, [batch()])
    loud[0] = False
    return compare(once, [batch(), batch(12), batch(16)]) if word == "ok" else word


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
    """With symbolic sizes a backward graph is compiled with its forward one, before either of
    them launches.
    """
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


# --- Restarts
# ---------------------------------------------------------------------------------------


def survivor_of_a_restart(rank):
    """Rank 0 stays as it is, rank 1 is a new process; Dynamo has compiled the function in one of
    them alone.
    """
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


CASES = {
    each.__name__: each
    for each in (
        unlike_data_parallel.data_parallel,
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
        print_on_rank_0_in_a_manager,
        equal_sums_are_one,
        equal_sums_beside_python,
        dynamic_on_rank_1,
        log_without_collective,
        forgotten_on_rank_1,
        survivor_of_a_restart,
        unlike_caches.record_lost_on_rank_0,
        unlike_caches.records_lost,
        unlike_caches.record_damaged_on_rank_1,
        unlike_caches.records_of_nothing,
        unlike_caches.record_too_deep,
        unlike_caches.coordinate_of_a_slice,
        unlike_caches.coordinate_of_an_operand,
        unlike_caches.coordinate_of_an_index,
        unlike_caches.coordinate_in_a_backward,
        unlike_data_parallel.data_set_last_batch_short,
        unlike_data_parallel.data_set_sharded,
        unlike_data_parallel.data_set_in_buckets,
        unlike_data_parallel.data_set_accumulated,
        unlike_data_parallel.data_set_evaluated_on_rank_0,
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
