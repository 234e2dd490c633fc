"""Host time of a compiled step: a DTensor module over the same one written with local tensors.

    python tools/bench/host.py --json tools/bench/results/host.json

A stack of Megatron MLPs on a fake group of 8 ranks: matrices so small that a call is host time,
guards included, and no collective takes any. Upstream's compiled module, ours, and the local one
compiled by the plugin take turns with the local one compiled by upstream, in one process; the
figures are ratios of medians and of the fastest calls. Training accumulates into ``.grad``. Time is
processor time of the thread, which does all of it: what others on the same machine take does not
count, but that they empty its caches does, which is what the fastest calls leave out.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed._functional_collectives as funcol
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import dynamo_dist
from dynamo_dist.testing import fake_mesh

RANKS, WIDTH = 8, 64
CALLS = 5  # of one variant in a row
VARIANTS = ("upstream", "ours", "local_by_ours", "local")
OURS = ("ours", "local_by_ours")  # compiled by the plugin
LOCAL = ("local_by_ours", "local")


class MLP(nn.Module):
    """One residual MLP; ``hidden`` is the global size for DTensors, this rank's for local
    tensors.
    """

    def __init__(self, hidden: int, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        return x + (y if self.mesh is None else funcol.all_reduce(y, "sum", self.mesh))


def model(layers: int, mesh: DeviceMesh, variant: str) -> nn.Module:
    """A module class of its own for each variant, so that none shares another's compiled code."""
    local = variant in LOCAL
    hidden = WIDTH if local else WIDTH * RANKS
    made = nn.Sequential(*(MLP(hidden, mesh if local else None) for _ in range(layers)))
    if not local:
        plan = {}
        for layer in range(layers):
            plan |= {f"{layer}.up": ColwiseParallel(), f"{layer}.down": RowwiseParallel()}
        parallelize_module(made, mesh, plan)
    return made


def calls(layers: int, mesh: DeviceMesh, variant: str) -> dict[str, Callable[[], object]]:
    """The compiled forward and training step, compiled and warm."""
    x = torch.randn(4, WIDTH)
    made: dict[str, Callable[[], object]] = {}
    for phase in ("forward", "training"):
        torch.manual_seed(0)
        module = model(layers, mesh, variant)

        def whole(x: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            return module(x)

        # A code object of its own: compiled versions of one are tried in turn.
        whole.__code__ = whole.__code__.replace(co_name=f"{variant}_{phase}_{layers}")
        step = torch.compile(
            whole, backend="dynamo_dist" if variant in OURS else "inductor", fullgraph=True
        )

        def forward(step: Callable[..., torch.Tensor] = step) -> object:
            with torch.no_grad():
                return step(x)

        def training(step: Callable[..., torch.Tensor] = step) -> object:
            return step(x).sum().backward()

        made[phase] = forward if phase == "forward" else training
        for _ in range(3):
            made[phase]()
    return made


def measure(layers: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """phase -> variant -> seconds of each call."""
    with fake_mesh(RANKS) as mesh:
        steps = {}
        for variant in track(VARIANTS, description=f"compile {layers} layers", transient=True):
            steps[variant] = calls(layers, mesh, variant)
            dynamo_dist.disable()
        result = {}
        for phase in ("forward", "training"):
            times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
            for _ in track(range(rounds), description=phase, transient=True):
                for variant in VARIANTS:
                    # What enabling changes in torch at run time must not speed upstream up.
                    on = dynamo_dist.enabled() if variant in OURS else nullcontext()
                    with on:
                        for _ in range(CALLS):
                            start = time.thread_time()
                            steps[variant][phase]()
                            times[variant].append(time.thread_time() - start)
            result[phase] = times
    torch.compiler.reset()
    return result


def main() -> None:
    """Measure, print a table and write it as JSON if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=40, help="turns of five calls each")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(1)

    rows = []
    for layers in args.layers:
        for phase, seconds in measure(layers, args.rounds).items():
            row = {"layers": layers, "phase": phase}
            for name, of in (("", median), ("_least", min)):
                for variant in VARIANTS[:-1]:
                    ratio = of(seconds[variant]) / of(seconds["local"])
                    row[f"{variant}_over_local{name}"] = round(ratio, 3)
            rows.append(row)
    table = Table(
        "layers",
        "phase",
        *VARIANTS[:-1],
        title="host time of a step over the local one's: medians (fastest calls)",
    )
    for row in rows:
        ratios = (
            f"{row[f'{variant}_over_local']} ({row[f'{variant}_over_local_least']})"
            for variant in VARIANTS[:-1]
        )
        table.add_row(str(row["layers"]), str(row["phase"]), *ratios)
    Console().print(table)
    if args.json:
        document = {
            "measured": (
                "processor time of one process on a fake group of 8 ranks, ratios of medians and "
                "of the fastest calls"
            ),
            "processes_running": os.getloadavg()[1],
            "cores": os.cpu_count(),
            "command": " ".join(["python", "tools/bench/host.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "rounds": args.rounds,
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
