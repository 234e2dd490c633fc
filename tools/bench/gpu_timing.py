"""Timing and checking on one GPU, for the measurements of ``gpu.py``."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

REPEATS = 20
WARM_UPS = 3
# At least this long the device idles while the host enqueues what is timed, so that launches cost
# no device time.
HEAD_START_NS = 1_000_000
# Of what a slow host took for it in a warm-up call; and the most, as a call may wait for the device
# itself.
HEAD_START_MARGIN = 2
MOST_HEAD_START_NS = 50_000_000


@triton.jit
def idle_kernel(ns: tl.tensor) -> None:
    """Keep one multiprocessor, and so the stream, busy for that long."""
    end = globaltimer() + ns
    while globaltimer() < end:
        pass


def median_us(fn: Callable[[], Any], before: Callable[[], Any] = lambda: None) -> float:
    """Median device time of ``fn``, in microseconds; ``before`` is not timed, nor is the host's
    part of ``fn``.
    """
    return in_turns_us({"fn": fn}, {"fn": before})["fn"]


def head_start_ns(host_ns: int) -> int:
    """Nanoseconds to idle for a call that the host takes ``host_ns`` to enqueue; of few sizes, as
    kernels are compiled for divisors of their arguments.
    """
    wanted = min(HEAD_START_MARGIN * host_ns, MOST_HEAD_START_NS)
    step = 1_000_000
    return max(HEAD_START_NS, -(-wanted // step) * step)


def in_turns_us(
    variants: Mapping[str, Callable[[], Any]], before: Mapping[str, Callable[[], Any]]
) -> dict[str, float]:
    """Median device time of each, in microseconds, taken in turns: a chip that warms up slows all
    alike.

    ``before`` is not timed. Before each call the device idles for longer than the host took for the
    last warm-up.
    """
    heads = dict.fromkeys(variants, HEAD_START_NS)
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARM_UPS + REPEATS):
        for name, fn in variants.items():
            before.get(name, lambda: None)()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            idle_kernel[(1,)](heads[name])
            start.record()
            begun = time.perf_counter_ns()
            fn()
            if turn < WARM_UPS:
                heads[name] = head_start_ns(time.perf_counter_ns() - begun)
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
