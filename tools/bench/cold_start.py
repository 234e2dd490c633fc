#!/usr/bin/env python
"""How much does a program's first step take, cold and from caches, beside upstream?

    python tools/bench/cold_start.py [--parallel WAY ...] [--layers N ...] [--ranks N ...]

Gloo ranks on this host take the first training step of a stack of blocks (attention, gated MLP,
RMSNorm), in fresh processes: once with an empty cache folder that they share, then again with what
is in it. One of them compiles what all have, or with ``each`` each for itself
(``options={"compile": "each"}``). ``alone`` is one rank of as many by itself, on a fake group, with
an empty cache folder. Blocks are tensor parallel, sharded by FSDP2, both (over halves of the
ranks), or whole under DDP; ``whole`` is FSDP2 and an update by AdamW, for us as one graph, for
upstream with an eager optimizer. Upstream compiles the model in one, as far as it gets. Printed
are processor seconds of a rank, the mean over ranks, with those of the compilers and other
processes that it starts, from after imports and ``init_process_group``, our packages having their
byte code, as pip leaves it; what passed by the clock, which others on the machine lengthen; and
what torch counted of its caches on the first rank: graphs that AOTAutograd and Inductor found.
"""

from __future__ import annotations

import argparse
import compileall
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

BACKENDS: dict[str, dict[str, Any]] = {
    "upstream": {"backend": "inductor"},
    "ours": {"backend": "dynamo_dist"},
    "each": {"backend": "dynamo_dist", "options": {"compile": "each"}},
}
PARALLEL = ("tensor", "fsdp", "both", "ddp", "whole")
WIDTH = 128
STARTS = ("cold", "warm")
ALONE = "alone"


def processor_seconds() -> float:
    """Seconds of this process and of those that it started and has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def worker(options: argparse.Namespace) -> None:
    """One rank: its first step, as a line of JSON."""
    backend, start = options.worker, options.caches
    (layers,) = options.layers
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch._dynamo.utils import counters
    from torch._inductor.graph import GraphLowering
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    from inductor_passes.testing import leave_process
    from inductor_passes.torch_compat import c10d

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
            for name in "qkvo":
                self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=False))
            self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
            self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.before(x)
            batch, length, _ = h.shape
            q, k, v = (
                each(h).view(batch, length, -1, 16).transpose(1, 2)
                for each in (self.q, self.k, self.v)
            )
            mixed = torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v
            x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, -1))
            h = self.between(x)
            return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    compiled: list[object] = []
    lower = GraphLowering.compile_to_module

    def counted(self: Any) -> Any:
        compiled.append(None)
        return lower(self)

    GraphLowering.compile_to_module = counted  # type: ignore[method-assign]
    torch.set_num_threads(1)
    if start == ALONE:
        c10d.init_fake_group(options.ranks[0], 0)
    else:
        dist.init_process_group("gloo")
    (parallel,) = options.parallel
    by_tensor = {"tensor": dist.get_world_size(), "both": dist.get_world_size() // 2}
    of_tensor = by_tensor.get(parallel, 1)
    shape = (dist.get_world_size() // of_tensor, of_tensor)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[Block() for _ in range(layers)])
    if parallel in by_tensor:
        plan: dict[str, Any] = {}
        for layer in range(layers):
            plan |= {f"{layer}.{name}": ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
            plan |= {f"{layer}.{name}": RowwiseParallel() for name in ("o", "down")}
        parallelize_module(model, mesh["tp"], plan)
    for each in (*model.children(), model) if parallel in ("fsdp", "both", "whole") else ():
        fully_shard(each, mesh=mesh["dp"])
    if parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    x = torch.randn(2, 32, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    is_whole = parallel == "whole" and backend != "upstream"
    forward = model if is_whole else torch.compile(model, **BACKENDS[backend])

    def step() -> None:
        forward(x).square().mean().backward()
        if parallel == "whole":
            optimizer.step()
            optimizer.zero_grad()

    dist.barrier()
    clock, processor = time.perf_counter(), processor_seconds()
    (torch.compile(step, **BACKENDS[backend]) if is_whole else step)()
    found = {
        "processor_s": processor_seconds() - processor,
        "clock_s": time.perf_counter() - clock,
        "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
        "inductor_hits": counters["inductor"]["fxgraph_cache_hit"],
        "graphs_compiled": len(compiled),
    }
    print(json.dumps(found) + "\n", end="", flush=True)  # at once: ranks share the pipe
    dist.barrier()
    leave_process()


def first_step(
    backend: str, parallel: str, layers: int, ranks: int, folder: str, start: str
) -> dict[str, Any]:
    """A job's first step, in fresh processes."""
    cache = Path(folder, ALONE if start == ALONE else "cache")
    launcher = ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone")
    done = subprocess.run(
        [
            *(sys.executable, *(() if start == ALONE else launcher), __file__),
            *("--worker", backend, "--layers", str(layers), "--ranks", str(ranks)),
            *("--parallel", parallel, "--caches", start),
        ],
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # a rank waits for each compiler it starts
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        "processor_s": round(mean(each["processor_s"] for each in found), 2),
        "clock_s": round(max(each["clock_s"] for each in found), 1),
        "aot_hits": found[0]["aot_hits"],
        "inductor_hits": found[0]["inductor_hits"],
        "graphs_compiled": sum(each["graphs_compiled"] for each in found),
    }


def _starts(backend: str) -> tuple[str, ...]:
    return (*STARTS, ALONE) if backend == "each" else STARTS


def main() -> None:
    """Measure, print a line a job and write them as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--parallel", nargs="+", choices=PARALLEL, default=list(PARALLEL))
    parser.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)
    parser.add_argument("--caches", choices=(*STARTS, ALONE), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    import torch

    for package in ("dynamo_dist", "inductor_passes"):
        compileall.compile_dir(Path(__file__).parents[2] / package, quiet=1)
    rows = []
    programs = itertools.product(options.parallel, options.layers, options.ranks, options.backends)
    for parallel, layers, ranks, backend in programs:
        program = {"parallel": parallel, "layers": layers, "ranks": ranks, "backend": backend}
        with tempfile.TemporaryDirectory() as folder:
            for start in _starts(backend):
                found = first_step(backend, parallel, layers, ranks, folder, start)
                rows.append({**program, "start": start, **found})
                print(*(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if options.json:
        document = {
            "measured": (
                "first training step of real gloo ranks on one host: processor seconds of a rank "
                "and its children"
            ),
            "command": " ".join(["python", "tools/bench/cold_start.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "cores": os.cpu_count(),
            "processes_running": round(os.getloadavg()[1], 2),
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
