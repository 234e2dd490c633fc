"""Predicted time of each fused kernel, to hold against what it replaces.

The figures of a machine, and a few of the kernels' own that no GPU has measured yet: they are assumed, and
``tools/bench/gpu.py`` measures them. All times in microseconds, sizes local to one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes.machine.prices.machine import Machine

# Assumed: the share of cuBLAS's rate that a Triton product with pipelined loads reaches.
TRITON_SHARE = 0.85
# Assumed: the share of the link's rate that copies by a few multiprocessors reach.
COPY_SHARE = 0.9
# Assumed: a flag written at a peer, and seen there.
SIGNAL_US = 3.0
# 16 of the 132 multiprocessors of an H100 copy and do not multiply: kernels/all_gather_matmul.py.
MULTIPLYING_SHARE = 116 / 132
CHUNKS = 8  # a rank's rows, for the prediction; the kernel takes up to 16
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
    """Chunks come in over the link while the tiles of those before them are multiplied.

    ``payload_bytes`` is one rank's rows, ``matmul_us`` the unfused products, ``copied_bytes`` what is read
    and written for the gathered rows where somebody else wants them.
    """
    compute_us = matmul_us / TRITON_SHARE / MULTIPLYING_SHARE
    chunk_us = compute_us / (world * CHUNKS)
    arrival_us = payload_bytes / CHUNKS / _link_rate(machine)
    done = CHUNKS * chunk_us  # this rank's own rows wait for nothing
    for chunk in range((world - 1) * CHUNKS):
        done = max(done, SIGNAL_US + (chunk + 1) * arrival_us) + chunk_us
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
    compute_us = matmul_us / TRITON_SHARE
    first_us = compute_us / (world * CHUNKS)
    sent_us = first_us + (world - 1) * result_bytes / _link_rate(machine)
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
