"""What ``costs measure`` finds on this GPU, and how much longer a product takes beside a copy."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_products import GatherCase
from gpu_timing import median_us

SECONDS = 20
SHAPE = (8192, 1280, 8192)  # its product takes less time than the link below
RATES = (450.0, 150.0)  # GB/s
COPY_BYTES = 1 << 30


def measure_costs() -> dict[str, Any]:
    """The topology file, and the stretch of a product beside copies."""
    found: dict[str, Any] = {"beside_copies": beside_copies()}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "here.json"
        command = [sys.executable, "-m", "inductor_passes", "costs", "measure", "--out", str(out)]
        done = subprocess.run(
            [*command, "--seconds", str(SECONDS)], capture_output=True, text=True, check=False
        )
        print(done.stdout, done.stderr, flush=True)
        if done.returncode:
            return found | {"problem": f"costs measure: {done.stderr[-1000:]}"}
        return found | {"topology": json.loads(out.read_text())}


def beside_copies() -> dict[str, float]:
    """Microseconds of one product alone and beside copies that last longer; ``stretch`` are
    ratios.
    """
    case = GatherCase(*SHAPE)
    alone = median_us(case.cublas)
    found = {"alone_us": alone}
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    inside, host = torch.empty_like(source), torch.empty(COPY_BYTES, dtype=torch.uint8)
    pinned = host.pin_memory() if torch.cuda.is_available() else host

    def beside(copy: Any) -> None:
        # The end of the product is timed, not that of the copy.
        case.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(case.side):
            copy()
        case.cublas()

    def linked(rate: float) -> None:
        case.link.begin()
        case.link.send(rate)

    def ready() -> None:
        case.link.prepare(case.beside_link)

    for rate in RATES:
        us = median_us(lambda rate=rate: beside(lambda: linked(rate)), ready)
        found[f"stretch, 16 programs at {rate:.0f} GB/s"] = us / alone
    us = median_us(lambda: beside(lambda: inside.copy_(source, non_blocking=True)))
    found["stretch, copy_ within memory"] = us / alone
    us = median_us(lambda: beside(lambda: pinned.copy_(source, non_blocking=True)))
    found["stretch, copy_ to the host by the copy engine"] = us / alone
    return found
