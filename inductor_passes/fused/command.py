"""``python -m inductor_passes kernels``: the fused kernels, what each needs, whether it can run
here.

``--json`` prints one object::

    {"triton": str or null,      installed version
     "why_not": str,             why none can run in this process; "" if they can
     "kernels": [{"name", "replaces", "fused_by", "needs": [str], "dtypes": [str], "runs": bool}]}

The exit status is 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from dataclasses import dataclass
from importlib import metadata

from inductor_passes.cli import print_entries
from inductor_passes.fused.kernels.availability import MAX_WORLD, is_installed, why_not_here

FLOATS = ("float32", "float16", "bfloat16")
PEERS = (
    "triton",
    "a CUDA device of capability 8.0 or later",
    "symmetric memory",
    f"2 to {MAX_WORLD} ranks on one host, with peer access",
)


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One operator of the namespace ``inductor_passes``. ``fused_by`` is the pass that emits it."""

    name: str
    replaces: str
    fused_by: str
    needs: tuple[str, ...]
    dtypes: tuple[str, ...] = FLOATS


KERNELS = (
    KernelRow(
        "all_reduce_add_rmsnorm",
        "all_reduce, wait, additions, RMS norm",
        "fuse_all_reduce_add_norm",
        (*PEERS, "rows of at most 16384", "capability 8.9 for a float8 result"),
    ),
    KernelRow(
        "all_reduce_add_layernorm",
        "all_reduce, wait, additions, layer norm",
        "fuse_all_reduce_add_norm",
        (*PEERS, "rows of at most 16384", "capability 8.9 for a float8 result"),
    ),
    KernelRow(
        "all_gather_matmul",
        "all_gather, wait, one to three products",
        "fuse_all_gather_matmul",
        (*PEERS, "weights with one stride of 1"),
    ),
    KernelRow(
        "matmul_reduce_scatter",
        "product, reduce_scatter, wait",
        "fuse_matmul_reduce_scatter",
        (*PEERS, "rows that all ranks share evenly"),
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``kernels``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Print the list; the exit status."""
    obstacle = why_not_here()
    if arguments.json:
        rows = [{**dataclasses.asdict(k), "runs": not obstacle} for k in KERNELS]
        version = metadata.version("triton") if is_installed() else None
        print(json.dumps({"triton": version, "why_not": obstacle, "kernels": rows}, indent=1))
    else:
        _render(obstacle)
    return 0


def _render(obstacle: str) -> None:
    from rich.console import Console  # slow to import, and ``--json`` prints without it

    print_entries(
        Console(),
        (
            (
                kernel.name,
                (
                    f"in place of {kernel.replaces}",
                    f"fused by {kernel.fused_by}",
                    f"needs {'; '.join(kernel.needs)}",
                    f"runs here: {obstacle or 'yes'}",
                ),
            )
            for kernel in KERNELS
        ),
    )
