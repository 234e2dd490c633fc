"""Timing and checking on one GPU, for the measurements of ``gpu.py``."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

REPEATS = 20
WARM_UPS = 3
# Longer than the host takes to enqueue what is timed, so that launches cost no device time.
HEAD_START_NS = 1_000_000


@triton.jit
def idle_kernel(ns: tl.tensor) -> None:
    """Keep one multiprocessor, and so the stream, busy for that long."""
    end = globaltimer() + ns
    while globaltimer() < end:
        pass


def median_us(fn: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Median device time of ``fn``, in microseconds; ``before`` is not timed, nor is the host's part of ``fn``."""
    times = []
    for _ in range(WARM_UPS + REPEATS):
        before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        idle_kernel[(1,)](HEAD_START_NS)
        start.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times[WARM_UPS:])


def in_turns_us(
    variants: Mapping[str, Callable[[], Any]], before: Mapping[str, Callable[[], Any]]
) -> dict[str, float]:
    """Median device time of each, in microseconds, taken in turns: a chip that warms up slows all alike.

    ``before`` is not timed; launches of a variant must take the host less than the head start.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(WARM_UPS + REPEATS):
        for name, fn in variants.items():
            before.get(name, lambda: None)()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            idle_kernel[(1,)](HEAD_START_NS)
            start.record()
            fn()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1e3 * start.elapsed_time(end))
    return {name: statistics.median(taken[WARM_UPS:]) for name, taken in times.items()}


@contextlib.contextmanager
def poisoned_outputs() -> Iterator[None]:
    """Inside, new tensors are filled with NaN: an element that nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference over the largest value; infinite where something is NaN."""
    difference = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return difference.nan_to_num(nan=float("inf")).item()


def copy_gb_per_s(size: int = 1 << 29) -> float:
    """Reads plus writes of a large copy: what memory bandwidth is here."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / median_us(lambda: target.copy_(source)) / 1e3
