"""The kernel that memory bounds, on one GPU: ``all_reduce_add_rmsnorm`` on virtual ranks."""

from __future__ import annotations

from typing import Any

import torch
from gpu_timing import median_us, poisoned_outputs, relative_error

from inductor_passes.fused.kernels.all_reduce_add_norm import Norm, launch_all_reduce_add_norm
from inductor_passes.fused.kernels.tiles import multiprocessors
from inductor_passes.fused.kernels.workspace import virtual_workspace

BF16 = torch.bfloat16
WORLD = 8
REPLAYS = 1000
# Looks at a flag: some ten seconds.
SPIN_LIMIT = 20_000_000


class NormCase:
    """Eight virtual ranks in one cooperative launch: every program of it is resident at once."""

    def __init__(self, rows: int, d: int, *, two_shot: bool) -> None:
        self.rows, self.d, self.two_shot = rows, d, two_shot
        self.x = torch.empty(WORLD * rows, d, device="cuda", dtype=BF16)
        self.residual = torch.empty_like(self.x)
        self.weight = torch.empty(d, device="cuda", dtype=BF16)
        self.terms = Norm(self.residual, weight=self.weight, out_dtype=BF16)
        self.fresh()
        place = torch.device("cuda")
        # Rows of 8192 take a multiprocessor each: one program on every, shared out among the ranks.
        self.space = virtual_workspace(
            "all_reduce_add_norm",
            WORLD,
            rows * d * BF16.itemsize * (2 if two_shot else 1),
            place,
            programs=multiprocessors(place) // WORLD,
            spin_limit=SPIN_LIMIT,
        )
        self.sent = torch.empty_like(self.x)
        self.add_norm = torch.compile(self._add_norm)

    def fresh(self) -> None:
        """New random inputs; ranks have their own x and one residual."""
        self.x.normal_()
        self.weight.normal_()
        self.residual[: self.rows].normal_()
        for rank in range(1, WORLD):
            self.residual[rank * self.rows :][: self.rows].copy_(self.residual[: self.rows])

    def fused(self) -> list[torch.Tensor]:
        return launch_all_reduce_add_norm(self.x, self.terms, self.space, two_shot=self.two_shot)

    def _add_norm(self, summed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = summed + self.residual
        return torch.nn.functional.rms_norm(total, (self.d,), self.weight, 1e-5), total

    def separate(self) -> None:
        """What ranks send and the sum that each gets by torch's kernels, the rest by Inductor's."""
        summed = self.sent.copy_(self.x).view(WORLD, self.rows, self.d).sum(0)
        self.add_norm(summed.repeat(WORLD, 1))

    def least_bytes(self) -> int:
        """What memory must move for all ranks even where the cache serves every second reader.

        Each rank reads x and residual and writes its buffer, total and norm; each buffer is read
        once.
        """
        streams = 6 + (2 / WORLD if self.two_shot else 0)
        return int(streams * self.x.nbytes)

    def error(self) -> float:
        """How far any rank is from the reference, on fresh inputs; infinite if ranks differ in a
        bit.
        """
        self.fresh()
        with poisoned_outputs():
            y = self.fused()[0].view(WORLD, self.rows, self.d)
        torch.cuda.synchronize()
        self.space.raise_if_failed()
        summed = self.x.view(WORLD, self.rows, self.d).sum(0, dtype=torch.float32)
        wanted = self.terms._replace(residual=self.residual[: self.rows]).of(summed)
        same = all(torch.equal(y[0], y[rank]) for rank in range(1, WORLD))
        return relative_error(y[0], wanted[0]) if same else float("inf")

    def replay(self) -> bool:
        """Whether a thousand replays of a CUDA graph end without an error, on the bits of a
        first call.
        """
        first = self.fused()[0].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = self.fused()[0]
        for replay in range(REPLAYS):
            if replay % 100 == 0:
                y.fill_(float("nan"))
            graph.replay()
        torch.cuda.synchronize()
        self.space.raise_if_failed()
        return torch.equal(y, first)


def measure_norm(
    copy_rate: float, rows: int = 4096, d: int = 8192, *, two_shot: bool
) -> dict[str, Any]:
    """Sum over ranks, residual and norm in one kernel, against the same work in several."""
    case = NormCase(rows, d, two_shot=two_shot)
    fused, separate = median_us(case.fused), median_us(case.separate)
    return {
        "shape": [WORLD, rows, d],
        "two_shot": two_shot,
        "fused": fused,
        "separate": separate,
        "share_of_copy": case.least_bytes() / fused / 1e3 / copy_rate,
        "speedup": separate / fused,
        "largest_error": case.error(),
        "replays": REPLAYS,
        "replays_keep_bits": case.replay(),
    }
