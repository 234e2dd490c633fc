#!/usr/bin/env python
"""Do ranks that settle on one order launch as well as a rank that would plan for itself?

    python tools/bench/adopted_plans.py [--json FILE]

Each program is compiled twice: by two real gloo ranks, which settle on a plan and adopt it, and by one process on a
fake group of two, which has nobody to ask. Printed are the predicted makespans of each graph, in microseconds, on the
topologies ``cpu-gloo`` and ``h100x8`` (simulated), adopted beside alone. Exits with 1 if one adopted is over 1 % longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel, init_device_mesh

import dynamo_dist
from inductor_passes.testing import fake_group, leave_process

TOPOLOGIES = ("cpu-gloo", "h100x8")
Step = Callable[[], object]


def averaged(mesh: DeviceMesh, mode: str, rows: int, width: int) -> Step:
    """A training step of eight layers under data parallelism."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)]
    model = nn.Sequential(*layers)
    if mode == "replicate":
        model = DistributedDataParallel(model)
    else:
        for layer in layers:
            fully_shard(layer, mesh=mesh)
    x = torch.randn(rows, width)
    return lambda: model(x).sum().backward()


def two_gathers(rows: int) -> Step:
    """Two gathers of different types, each before products of a length that ranks do not share."""
    world, double = dist.group.WORLD, torch.float64
    a, b = torch.randn(64, 128), torch.randn(64, 128, dtype=double)
    x, y = torch.randn(rows, 128), torch.randn(rows, 128, dtype=double)
    w, v = torch.randn(128, 128), torch.randn(128, 128, dtype=double)

    def step() -> object:
        gathered = fc.all_gather_tensor(a, 0, world), fc.all_gather_tensor(b, 0, world)
        return x @ gathered[0] @ w @ w @ w, y @ gathered[1] @ v @ v @ v

    return step


def six_sums(size: int) -> Step:
    """Six sums between products: what ``merge_tiny`` and buckets are for."""
    given, w = [torch.randn(64, n + 1) for n in range(6)], torch.randn(size, size)

    def step() -> object:
        found, product = [], w
        for each in given:
            found.append(fc.all_reduce(each, "sum", dist.group.WORLD))
            product = product @ w
        return found, product

    return step


def readme(mesh: DeviceMesh) -> Step:
    """The README's first program."""
    weights = [distribute_tensor(torch.randn(1024, 1024), mesh, [Shard(0)]) for _ in range(3)]
    x = torch.randn(256, 1024)

    def step() -> object:
        y = x
        for w in weights:
            y = torch.relu(y @ w.redistribute(placements=[Replicate()]).to_local())
        return y

    return step


def split(mesh: DeviceMesh) -> Step:
    """A training step of four blocks under tensor parallelism."""
    model = nn.Sequential()
    for _ in range(4):
        block = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        model.append(block)
    x = torch.randn(64, 256)
    return lambda: model(x).sum().backward()


PROGRAMS: dict[str, Callable[[DeviceMesh], Step]] = {
    "data parallel, replicated, 16 rows": lambda mesh: averaged(mesh, "replicate", 16, 64),
    "data parallel, replicated, 256 rows": lambda mesh: averaged(mesh, "replicate", 256, 1024),
    "data parallel, sharded, 256 rows": lambda mesh: averaged(mesh, "fully_shard", 256, 1024),
    "two gathers, 4 rows": lambda mesh: two_gathers(4),
    "two gathers, 40000 rows": lambda mesh: two_gathers(40000),
    "six sums, products of 4": lambda mesh: six_sums(4),
    "six sums, products of 1024": lambda mesh: six_sums(1024),
    "README": readme,
    "tensor parallel": split,
}


def makespans(job: Callable[[str], AbstractContextManager[None]]) -> dict[str, dict[str, float]]:
    """Predicted microseconds by program and topology, and by graph. ``job``: makes one of this name, of two ranks."""
    found = {}
    for name, make in PROGRAMS.items():
        for topology in TOPOLOGIES:
            with job(label := f"{name}, {topology}"):
                torch.manual_seed(0)
                torch.compiler.reset()
                step = make(init_device_mesh("cpu", (2,)))
                report: Any = dynamo_dist.explain(step, options={"topology": topology})()
            found[label] = {graph.graph_id: graph.after.makespan_us for graph in report.graphs}
    return found


@contextlib.contextmanager
def real(folder: Path, name: str) -> Iterator[None]:
    """A job of this rank and its peer that knows nothing of earlier ones."""
    store = dist.FileStore(str(folder / name.replace(" ", "_")), 2)
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=2)
    yield
    dist.barrier()
    dist.destroy_process_group()


def adopted(folder: str) -> dict[str, dict[str, float]]:
    """``makespans`` on two real ranks."""
    file = Path(folder, "adopted.json")
    run = (*("-m", "torch.distributed.run"), *("--nproc-per-node=2", "--standalone", __file__))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *run, "--worker", str(file)], check=True, env=environment)
    found: dict[str, dict[str, float]] = json.loads(file.read_text())
    return found


def main() -> int:
    """Compile both ways, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        found = makespans(partial(real, options.worker.parent))
        if os.environ["RANK"] == "0":
            options.worker.write_text(json.dumps(found))
        leave_process()
    with tempfile.TemporaryDirectory() as folder:
        together = adopted(folder)
    alone = makespans(lambda _name: fake_group(2))
    rows, worst = [], 0.0
    for name, graphs in alone.items():
        mine, theirs = sum(together[name].values()), sum(graphs.values())
        ratio = mine / theirs
        rows.append({"program": name, "adopted_us": mine, "alone_us": theirs, "ratio": ratio})
        worst = max(worst, ratio)
        print(f"{name}: adopted {mine:.1f} us, alone {theirs:.1f} us, {ratio:.4f}")
    print(f"worst {worst:.4f} of {len(rows)}")
    if options.json:
        record = {"kind": "simulated", "torch": torch.__version__, "worst": worst, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(worst > 1.01)


if __name__ == "__main__":
    sys.exit(main())
