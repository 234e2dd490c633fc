"""Register fused kernels: their passes, the command ``kernels``, and what compiled code needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from inductor_passes import registry
from inductor_passes.extension import Degraded, Extension
from inductor_passes.fused import FUSIONS
from inductor_passes.fused.kernels import availability, register_operators

if TYPE_CHECKING:
    from inductor_passes.records import GraphRecord


class FusedKernels(Extension):
    """Kernels of this process: whether they can run, their operators, and errors of their waits."""

    name = "fused kernels"
    commands: ClassVar[Mapping[str, tuple[str, str]]] = {
        "kernels": (
            "inductor_passes.fused.command",
            "fused kernels, what they need, what runs here",
        )
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
