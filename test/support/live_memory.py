"""Measure the bytes of tensors that are alive while a function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], Any], times: int = 5) -> int:
    """The most bytes of tensors that are alive during a call at once, over those before it.

    The median of several calls: when a collective's buffers die, its thread decides.
    """
    call()
    peaks = []
    for _ in range(times):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        live = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        peaks.append(most)
    return sorted(peaks)[times // 2]
