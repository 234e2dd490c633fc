"""This machine and this link as a topology: what a schedule for them is made for, and predicted
with.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from inductor_passes.cost.importing import add_to
from inductor_passes.cost.measure_device import CpuClock
from inductor_passes.cost.measure_links import layout_of_job, measure_links
from inductor_passes.cost.measured_topology import tables_of, topology_of
from inductor_passes.cost.topology import dump_topology

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from rescale import write_rescaled

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
PAYLOADS = (4, 16 << 10, 128 << 10, 1 << 20, 4 << 20)
SECONDS = 10.0


@dataclass(frozen=True)
class Alone:
    """A program's milliseconds without a link, measured, and its compute on ``cpu-gloo``,
    modelled.
    """

    ms: float
    modelled_ms: float

    @property
    def slower(self) -> float:
        """How many times as long as on ``cpu-gloo`` this machine computes."""
        return self.ms / self.modelled_ms

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, path: str) -> Alone | None:
        """What ``write`` wrote; None for no path, or where nothing is."""
        if not path or not Path(path).exists():
            return None
        return cls(**json.loads(Path(path).read_text()))


def write_topology(path: Path, *, compute: float, kinds: Sequence[str] = KINDS) -> None:
    """Measure the link between the ranks; the first of them writes ``path``, which all may read
    then.

    ``compute``: how many times as slow as ``cpu-gloo`` this machine computes.
    """
    # Hosts of one machine are told apart by their ends of the link.
    layout = layout_of_job(os.environ["GLOO_SOCKET_IFNAME"])
    clock = CpuClock(statistics.median, "median")
    links = measure_links(clock, layout, seconds=SECONDS, kinds=kinds, payloads=PAYLOADS)
    if dist.get_rank() == 0:
        where = (
            f"{layout.ranks} gloo ranks on {layout.nodes} hosts of one machine, "
            f"torch {torch.__version__}, {datetime.date.today()}"
        )
        content = topology_of("cpu-gloo", name="this link", where=where, device=None, links=links)
        add_to(content, tables_of(where, None, links))
        path.write_text(dump_topology(content))
        write_rescaled(path, path, name="this link", compute=compute)
    dist.barrier()


def agreed_ms(median_ms: float) -> float:
    """Of the slowest rank, the same number on every rank: decisions are made with it."""
    slowest = torch.tensor(median_ms, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()
