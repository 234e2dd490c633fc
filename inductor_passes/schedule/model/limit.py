"""The limit of a problem: what no order and no cut of its launches into parts goes below.

All compute runs on one stream, and all bytes of a group on one channel, at the best rate that its link ever
reaches. A cut adds kernels, reads weights again and starts more launches; it takes none of this away.
"""

from __future__ import annotations

from inductor_passes.schedule.model.bound import least_us_per_mib
from inductor_passes.schedule.model.problem import MIB, Problem


def limit_us(problem: Problem) -> float:
    """Return the larger of all compute and the busiest channel, whose launches are priced by bytes alone."""
    busy = {"": sum(node.us for node in problem.nodes if node.kind == "compute")}
    rates: dict[tuple[str, str], float] = {}
    for node in problem.nodes:
        if node.kind == "launch":
            key = node.group, node.op
            if key not in rates:
                rates[key] = least_us_per_mib(problem.link_table(*key))
            link = f"group {node.group}"
            busy[link] = busy.get(link, 0.0) + rates[key] * node.payload / MIB
    return max(busy.values())
