"""The cost of one step: time, launches, memory."""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

# The c10d ops that start communication, as the profiler names them in eager and in compiled code
# alike: functional collectives end in these too. Longest names first.
_C10D_KINDS = (
    ("_reduce_scatter_base_", "reduce_scatter"),
    ("_allgather_base_", "all_gather"),
    ("allgather_into_tensor_coalesced_", "all_gather"),
    ("allgather_coalesced_", "all_gather"),
    ("allgather_", "all_gather"),
    ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    ("reduce_scatter_", "reduce_scatter"),
    ("allreduce_coalesced_", "all_reduce"),
    ("allreduce_", "all_reduce"),
    ("alltoall_base_", "all_to_all"),
    ("alltoall_", "all_to_all"),
    ("broadcast_", "broadcast"),
    ("gather_", "gather"),
    ("scatter_", "scatter"),
    ("reduce_", "reduce"),
    ("recv_any_source_", "recv"),
    ("recv_", "recv"),
    ("send", "send"),
)
_KIND_OF = {f"c10d::{name}": kind for name, kind in _C10D_KINDS}


def synchronize(device: torch.device) -> None:
    """Wait for the accelerator, so that a clock read next means something. No-op for the CPU."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def step_times(step: Callable[[], object], steps: int, device: torch.device) -> tuple[float, ...]:
    """Milliseconds of ``steps`` calls, each up to the end of its work on ``device``."""
    times = []
    for _ in range(steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return tuple(times)


@contextmanager
def launches_counted() -> Iterator[Counter[str]]:
    """Collectives launched inside the block by this process, by kind, whoever launched them.

    Seen by the profiler at the dispatcher, so it slows what it counts: not for timed steps.
    """
    counts: Counter[str] = Counter()
    # Kineto announces each profile on stderr, at any level it knows; it reads this once.
    quiet = "KINETO_LOG_LEVEL" not in os.environ
    if quiet:
        os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            yield counts
    finally:
        if quiet:
            os.environ.pop("KINETO_LOG_LEVEL", None)
    for event in profiler.events() or ():
        kind = _KIND_OF.get(event.name)
        if kind is not None:
            counts[kind] += 1


@dataclass(slots=True)
class Peak:
    """Peak memory over a block, and what it is the peak of."""

    bytes: int = 0
    source: str = ""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """The allocator's peak on a GPU; on a CPU the whole process's resident set."""
    peak = Peak()
    if device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = int(torch.accelerator.max_memory_allocated(device))
        peak.source = f"{device.type} allocator, peak"
        return
    resettable = _reset_resident_peak()
    yield peak
    peak.bytes = _resident_peak()
    peak.source = "process RSS, peak" if resettable else "process RSS, peak since its start"


def _reset_resident_peak() -> bool:
    """Return whether the kernel let us start the high-water mark anew (Linux, /proc writable)."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
