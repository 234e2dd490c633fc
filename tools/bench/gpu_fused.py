"""The fused kernels as parts of ``gpu.py``: every shape of products, and norms as the operator
chooses them.
"""

from __future__ import annotations

from typing import Any

import gpu_products
import gpu_streams
from gpu_timing import copy_gb_per_s

from inductor_passes.fused.kernels.all_reduce_add_norm import TWO_SHOT_BYTES

TOLERANCE = 2e-2  # one rounding to bfloat16, and of what is added
NORM_WIDTH = 8192
NORM_ROWS = (4096, 512, TWO_SHOT_BYTES // (2 * NORM_WIDTH), 4)


def measure_products() -> dict[str, Any]:
    """``all_gather_matmul`` of every shape: ``M x N x K`` -> what was measured."""
    found = {
        f"{m} x {n} x {k}": gpu_products.measure_all_gather_matmul(m, n, k)
        for m, n, k in gpu_products.PRODUCTS
    }
    return with_problems(found)


def measure_norms(width: int = NORM_WIDTH) -> dict[str, Any]:
    """``all_reduce_add_rmsnorm`` of each number of rows a rank: two-shot above
    ``TWO_SHOT_BYTES`` alone.
    """
    rate = copy_gb_per_s()
    found = {}
    for rows in NORM_ROWS:
        two_shot = rows * width * 2 > TWO_SHOT_BYTES
        name = f"{rows} rows, {'two' if two_shot else 'one'}-shot"
        found[name] = gpu_streams.measure_norm(rate, rows, width, two_shot=two_shot)
    return with_problems(found)


def with_problems(found: dict[str, Any]) -> dict[str, Any]:
    """The same, with a ``problem`` where a number is wrong."""
    problems = wrong_numbers(found)
    return found | ({"problem": "; ".join(problems)} if problems else {})


def wrong_numbers(found: dict[str, Any]) -> list[str]:
    """Every case whose largest error is too large, or whose replays changed a bit."""
    problems = []
    for name, case in found.items():
        for row in (case, *case.get("links", ())):
            error = row.get("largest_error", 0.0)
            if not error <= TOLERANCE:
                problems.append(f"{name}: the largest error is {error} of {TOLERANCE}")
        if not case.get("replays_keep_bits", True):
            problems.append(f"{name}: replays of a CUDA graph changed bits")
    return problems
