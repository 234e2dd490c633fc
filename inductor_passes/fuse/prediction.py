"""Predicted time of each fused kernel, to hold against what it replaces.

The figures of a machine, and a few of the kernels' own, fitted to what one H100 measured
(``tools/bench/results/gpu.json``), without what a link between GPUs adds. All times in microseconds, sizes local to one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from inductor_passes.cost.machine import Machine

# The share of cuBLAS's rate that tiles by descriptors reach: 0.92 to 0.97 from the shortest to the longest product.
PRODUCT_SHARE = 0.95
# Bytes a microsecond that 16 programs copy beside a product, whatever the link: alone they copy 527,000.
COPIED_BESIDE_PRODUCT = 320e3
# What copies cost the product beside them: memory, as a share of the time of their bytes at 450 GB/s, and 16 of 132
# multiprocessors until they are done.
MEMORY_COST = 0.22
BYTES_OF_COST = 450e3
COPIERS_SHARE = 16 / 132
# Between two tiles that are pushed: storing one, and no product beside it.
PUSH_US = 2.6
TILE_BYTES = 128 * 256 * 2
MULTIPROCESSORS = 132
# Assumed, for no link between GPUs was there to measure: the share of its rate that copies by kernels reach.
COPY_SHARE = 0.9
# A barrier of all ranks in one memory, with what a launch has besides; a link adds its latency.
SIGNAL_US = 4.0
LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time of the launch that is exposed and of its consumers, and of the kernel in their place."""

    unfused_us: float
    fused_us: float

    @property
    def gain(self) -> float:
        """Share of the unfused time that is saved; negative for a loss."""
        return 1 - self.fused_us / self.unfused_us if self.unfused_us > 0 else 0.0

    @property
    def pays(self) -> bool:
        """Return whether it saves enough to be worth the change."""
        return self.gain >= LEAST_GAIN


def all_gather_matmul_us(
    machine: Machine, payload_bytes: float, world: int, matmul_us: float, copied_bytes: float
) -> float:
    """Rows come in over the link while the tiles of those before them are multiplied.

    ``payload_bytes`` is one rank's rows, ``matmul_us`` the unfused products, ``copied_bytes`` what is read
    and written for the gathered rows where somebody else wants them.
    """
    sent = (world - 1) * payload_bytes
    link_us = sent / min(_link_rate(machine), COPIED_BESIDE_PRODUCT)
    compute_us = (
        matmul_us / PRODUCT_SHARE + MEMORY_COST * sent / BYTES_OF_COST + COPIERS_SHARE * link_us
    )
    # Where the link is longer, the last rank's rows are multiplied behind it.
    done = max(compute_us, link_us + matmul_us / PRODUCT_SHARE / world) + SIGNAL_US
    copy_us = machine.memory_us(copied_bytes)
    return (
        machine.kernel_start_us
        + done
        + (copy_us + machine.kernel_start_us if copied_bytes else 0.0)
    )


def matmul_reduce_scatter_us(
    machine: Machine, result_bytes: float, world: int, matmul_us: float
) -> float:
    """Tiles travel while later ones are computed; then ``world`` parts of ``result_bytes`` are added."""
    waves = math.ceil(world * result_bytes / TILE_BYTES / MULTIPROCESSORS)
    compute_us = matmul_us / PRODUCT_SHARE + PUSH_US * waves
    sent_us = compute_us / waves + (world - 1) * result_bytes / _link_rate(machine)
    added_us = machine.memory_us((world + 1) * result_bytes)
    return max(compute_us, sent_us) + SIGNAL_US + added_us + 2 * machine.kernel_start_us


def all_reduce_norm_us(
    machine: Machine, payload_bytes: float, world: int, *, two_shot: bool, streams: int
) -> float:
    """One kernel; ``streams`` counts tensors of ``payload_bytes`` that the norm itself reads and writes."""
    rounds = 2 if two_shot else 1
    share = 2 / world if two_shot else 1.0
    link_us = share * (world - 1) * payload_bytes / _link_rate(machine)
    memory_us = machine.memory_us((2 * rounds + streams) * payload_bytes)
    return machine.kernel_start_us + rounds * SIGNAL_US + link_us + memory_us


def _link_rate(machine: Machine) -> float:
    """Bytes a microsecond, of one rank to its peers on the same host."""
    return machine.link_bytes_per_us * COPY_SHARE
