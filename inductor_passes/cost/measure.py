"""A machine measured: its device alone and, inside an initialised job, the links between its ranks.

``measure_device`` and ``measure_links`` may be called from any program; all ranks call them together, and all
get the same answer. ``topology_of`` makes a topology file's content of what they found.
"""

from inductor_passes.cost.clock import CpuClock, CudaClock
from inductor_passes.cost.measure_device import DeviceTimes, measure_device
from inductor_passes.cost.measure_links import (
    KINDS,
    Layout,
    LinkTimes,
    layout_of_job,
    measure_links,
)
from inductor_passes.cost.measured_topology import topology_of

__all__ = [
    "KINDS",
    "CpuClock",
    "CudaClock",
    "DeviceTimes",
    "Layout",
    "LinkTimes",
    "layout_of_job",
    "measure_device",
    "measure_links",
    "topology_of",
]
