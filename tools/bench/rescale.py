"""A machine like another one, but slower or faster: what a schedule makes of it, and of a
measured one.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from inductor_passes.cost.topology import topology_text

_PER_SECOND = (
    "peak_tflops",
    "memory_gb_per_s",
    "intra_node_gb_per_s",
    "inter_node_gb_per_s",
    "gb_per_s",
)
_MICROSECONDS = ("kernel_us", "launch_us", "launching_us", "step_us")


def write_rescaled(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    name: str,
    compute: float = 1.0,
    links: float = 1.0,
) -> None:
    """Write a topology, by name or path, to ``target``, its kernels and links that many times as
    slow.

    Every figure's source says by how much it was scaled. Raises TopologyError if there is no
    ``source``.
    """
    file = json.loads(topology_text(source))
    file["name"] = name
    _slow_down(file["device"], compute)
    _slow_down(file["links"], links)
    Path(target).write_text(json.dumps(file, indent=1) + "\n")


def _slow_down(section: dict[str, Any], factor: float) -> None:
    """Stretch every time in a section, and those of its sections, by ``factor``."""
    for key, value in section.items():
        if key in _PER_SECOND or key in _MICROSECONDS:
            value["value"] *= factor if key in _MICROSECONDS else 1 / factor
            value["source"] += f"; {factor:.6g} times as slow"
        elif key in ("measured", "measured_products"):
            for entry in value:
                entry["points"] = [[*what, us * factor] for *what, us in entry["points"]]
                entry["source"] += f"; {factor:.6g} times as slow"
        elif key == "protocols":
            for protocol in value:
                _slow_down(protocol, factor)
        elif isinstance(value, dict) and "value" not in value:
            _slow_down(value, factor)
