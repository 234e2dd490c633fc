"""Slowdown of kernels beside a collective: it takes cores, multiprocessors and memory's bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import torch

from inductor_passes.machine.measure.clock import Clock, repeated, typical_us

# Of the payloads measured, the largest whose collective takes no longer than this.
LONGEST_US = 200e3
WIDTH, CUDA_WIDTH = 256, 4096
# No overlap at all would be an endless stretch.
MOST = 10.0


def measure_stretch(
    clock: Clock,
    points: dict[int, float],
    launch_of: Callable[[int], Callable[[], torch.Tensor]],
    budget_us: float,
) -> float:
    """Measure how many times as long kernels take while a collective is on its way; at least 1.

    ``points``: microseconds of the collective by payload. ``launch_of`` gives, for a payload, what launches
    it. Products that take about as long as the collective are timed alone and beside it. Every rank of the
    job calls this, with equal arguments.
    """
    payload = max((p for p, us in points.items() if us <= LONGEST_US), default=min(points))
    launch = launch_of(payload)
    size = CUDA_WIDTH if clock.device.type == "cuda" else WIDTH
    factor = torch.randn(size, size, device=clock.device)

    def product() -> torch.Tensor:
        return factor @ factor

    times = max(1, round(points[payload] / typical_us(clock, product, budget_us / 8)))
    compute = repeated(product, times, clock.device)

    def collective() -> None:
        torch.ops._c10d_functional.wait_tensor(launch())

    def both() -> None:
        launched = launch()
        compute()
        torch.ops._c10d_functional.wait_tensor(launched)

    alone_us = typical_us(clock, compute, budget_us / 4)
    collective_us = typical_us(clock, collective, budget_us / 4)
    return stretch_of(alone_us, collective_us, typical_us(clock, both, budget_us / 4))


def stretch_of(alone_us: float, collective_us: float, both_us: float) -> float:
    """The stretch by which compute and a collective, launched together, take ``both_us``.

    While the collective is on its way compute goes on at a stretched pace, and then at its own.
    """
    if both_us <= collective_us:
        return 1.0
    done_beside = collective_us - max(both_us - alone_us, 0.0)
    return collective_us / max(done_beside, collective_us / MOST)
