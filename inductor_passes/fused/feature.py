"""Register fused kernels: their passes, the command ``kernels``, and what compiled code needs.

``python -m inductor_passes kernels``: the fused kernels, what each needs, whether it can run
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, ClassVar

from inductor_passes import registry
from inductor_passes.cli import print_entries
from inductor_passes.extension import Degraded, Extension
from inductor_passes.fused import FUSIONS
from inductor_passes.fused.kernels import availability, register_operators

if TYPE_CHECKING:
    from inductor_passes.records import GraphRecord


class FusedKernels(Extension):
    """Kernels of this process: whether they can run, their operators, and errors of their waits."""

    name = "fused kernels"
    commands: ClassVar[Mapping[str, tuple[str, str]]] = {
        "kernels": (__name__, "fused kernels, what they need, what runs here")
    }
    log_artifact = "dist_fuse"

    def cache_key(self) -> str:
        # Where fused kernels cannot run, the same graph compiles otherwise.
        return f"{availability.why_not_here()} {availability.ranks_per_host()}"

    def binds_groups(self) -> bool:
        # The memory that a kernel shares with peers is set up under the group's own name.
        return not availability.why_not_here()

    def before_compile(self) -> None:
        if not availability.why_not_here():
            register_operators()

    def before_call(self) -> Callable[[], object] | None:
        if availability.why_not_here():
            return None
        from inductor_passes.fused.kernels.workspace import raise_if_failed  # imports triton

        # Replaying a CUDA graph runs no operator that would raise what an earlier call reported.
        return lambda: raise_if_failed(wait=False)

    def log_lines(self, record: GraphRecord) -> Sequence[str]:
        """Return each decision of a pass whose name begins with ``fuse_``, or why the pass did not
        run.
        """
        return [
            f"{p.name}: {said}"
            for p in record.passes
            if p.name.startswith("fuse_")
            for said in (p.notes or ((p.reason,) if p.reason else ()))
        ]

    def degraded(self) -> Sequence[Degraded]:
        if availability.is_installed():
            return ()
        return (
            Degraded(
                "fusing of collectives into kernels",
                "triton is not installed.",
                "pip install triton (Linux with an NVIDIA or AMD GPU).",
            ),
        )


def register() -> None:
    """Add the fusions after all passes, and the extension."""
    for fusion in FUSIONS:
        registry.register(fusion)
    registry.register_extension(FusedKernels())


FLOATS = ("float32", "float16", "bfloat16")
PEERS = (
    "triton",
    "a CUDA device of capability 8.0 or later",
    "symmetric memory",
    f"2 to {availability.MAX_WORLD} ranks on one host, with peer access",
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
    obstacle = availability.why_not_here()
    if arguments.json:
        rows = [{**dataclasses.asdict(k), "runs": not obstacle} for k in KERNELS]
        version = metadata.version("triton") if availability.is_installed() else None
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
                    f"runs here: {f'no, {obstacle}' if obstacle else 'yes'}",
                ),
            )
            for kernel in KERNELS
        ),
    )
