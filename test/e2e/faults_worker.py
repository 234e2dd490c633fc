"""One process of ``test_faults.py``: a step under a fault, which the first argument names."""

import datetime
import json
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

import dynamo_dist
import inductor_passes
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.testing import fake_group, leave_process

SECONDS = 20  # how long a rank waits for another


def step(x, weights):
    for w in weights:
        x = torch.relu(x @ fc.all_gather_tensor(w, 0, dist.group.WORLD))
    return fc.all_reduce(x, "sum", dist.group.WORLD).sum() + fc.all_reduce(
        x.mean(), "sum", dist.group.WORLD
    )


def inputs(ranks):
    torch.manual_seed(0)
    return torch.randn(8, 16).abs(), [torch.rand(16 // ranks, 16) / 16 for _ in range(3)]


def compiled(function, **options):
    return torch.compile(function, backend="dynamo_dist", fullgraph=True, options=options)


def on_ranks(case):
    """Two real ranks, the second of which is in some way another."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=SECONDS))
    odd, options = dist.get_rank() == 1, {}
    if case == "torch" and odd:
        torch.__version__ = type(torch.__version__)("2.13.999")
    if case == "topology":
        options["topology"] = "h100x8" if odd else "cpu-gloo"
    if case == "variable" and odd:
        os.environ["DYNAMO_DIST_TRACKERS_OFF"] = "placement"
    x, weights = inputs(2)
    expected = step(x, weights)
    with graph_passes_only():
        run = compiled(step, **options)
        close = torch.allclose(run(x, weights), expected)
        if case == "killed":
            if odd:
                os.kill(os.getpid(), signal.SIGKILL)
            run(x, weights)
    print("right" if close else "wrong")


def fork():
    """The plugin on in the parent, a compile in the child and then in the parent."""
    dynamo_dist.enable()
    child = os.fork()
    with fake_group(2), graph_passes_only():
        x, weights = inputs(2)
        close = torch.allclose(compiled(step)(x, weights), step(x, weights))
    if child == 0:
        os._exit(0 if close else 1)
    _, status = os.waitpid(child, 0)
    print("right" if close and status == 0 else "wrong")


def threads():
    """Several threads compile at once, each its own function."""
    results, gate = {}, threading.Barrier(3)

    def main(number):
        def own(x, weights):
            return step(x, weights) * number

        x, weights = inputs(2)
        expected = own(x, weights)
        gate.wait()
        with graph_passes_only():
            results[number] = torch.allclose(compiled(own)(x, weights), expected)

    with fake_group(2):
        workers = [threading.Thread(target=main, args=(number,)) for number in range(1, 4)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    print("right" if results == {1: True, 2: True, 3: True} else f"wrong: {results}")


class Slow(inductor_passes.GraphPass):
    """Says that the compile is under way, and takes long."""

    name = "slow"

    def run(self, graph):
        print("compiling", flush=True)
        time.sleep(100)
        return inductor_passes.PassStats(False)


def terminated():
    inductor_passes.register(Slow)
    with fake_group(2):
        compiled(step)(*inputs(2))


def code():
    """Through Inductor's code generation and caches; prints the number."""
    with fake_group(2):
        x, weights = inputs(2)
        found, expected = compiled(step)(x, weights), step(x, weights)
    close = torch.allclose(found, expected)
    print(json.dumps({"right": close, "sum": found.double().item()}))


if __name__ == "__main__":
    alone = {"fork": fork, "threads": threads, "terminated": terminated, "code": code}
    case = sys.argv[1]
    alone[case]() if case in alone else on_ranks(case)
    leave_process()
