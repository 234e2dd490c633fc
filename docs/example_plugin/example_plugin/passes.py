"""A pass and a topology. The entry point calls ``register`` once, when a process first compiles."""

from pathlib import Path

from torch import fx

import inductor_passes
from example_plugin.counting import waits_behind_launches


class CountWaits(inductor_passes.GraphPass):
    """Say in the report how many waits stand directly behind their launches; changes nothing.

    Requires: nothing.
    Ensures:  the graph is as it was.
    Stats:    ``waits_behind_launch``.
    """

    name = "count_waits"

    def run(self, graph: fx.Graph) -> inductor_passes.PassStats:
        count = waits_behind_launches(graph)
        return inductor_passes.PassStats(changed=False, counters={"waits_behind_launch": count})


def register() -> None:
    """``before`` and ``after`` take the name of any pass that is there already."""
    inductor_passes.register(CountWaits, before="schedule")
    inductor_passes.register_topology("example-cluster", Path(__file__).with_name("cluster.json"))
