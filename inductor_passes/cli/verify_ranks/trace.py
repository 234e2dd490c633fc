"""One rank of a script on a fake process group: its graphs, and what each launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from inductor_passes.cli.fake_rank import run_script
from inductor_passes.cli.verify_ranks.compare import PeerLaunch
from inductor_passes.records import OWN_SHARES, GraphRecord
from inductor_passes.reporting import recorder
from inductor_passes.torch_compat import c10d


@dataclass
class Traced:
    """Trace of one rank. ``graphs``: id -> launches in order. ``error``: what stopped the script, or ""."""

    rank: int
    graphs: dict[str, list[PeerLaunch]] = field(default_factory=dict)
    error: str = ""


def trace_rank(script: str, arguments: Sequence[str], rank: int, world_size: int) -> Traced:
    """Run ``script`` as one rank of ``world_size``. Call it in a process of its own."""
    found = Traced(rank)

    def keep(record: GraphRecord) -> None:
        groups = c10d.known_groups()
        found.graphs[record.graph_id] = [
            PeerLaunch(
                c.kind,
                groups.get(c.group_name, tuple(range(world_size))),
                0 if c.kind in OWN_SHARES else c.payload_bytes,
                c.dtype,
                c.reduce_op,
            )
            for c in record.collectives
            if c.agreed()
        ]

    unsubscribe = recorder.subscribe(keep)
    try:
        found.error = run_script(script, arguments, rank, world_size)
    finally:
        unsubscribe()
    return found
