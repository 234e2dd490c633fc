"""A stand-in for a GPU: launches go through Triton's binder and compiler for sm_90, and are
checked, not run.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cuda_timed_group
import gpu_copies
import gpu_costs
import gpu_fused
import gpu_products
import gpu_streams
import gpu_tests
import gpu_timing
import gpu_variants
import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MULTIPROCESSORS = 132
SHARED_BYTES = 227 << 10
MOST_PROGRAMS = (2**31 - 1, 65535, 65535)
MOST_THREADS = 1024


def _collectives() -> dict[str, Any]:
    """Every kind of collective of the paced group that steps are measured on."""
    c10d, x = torch.ops._c10d_functional, torch.empty(64, 8, dtype=torch.bfloat16)
    with cuda_timed_group.cuda_timed_group(8):
        for copies in ("programs", "engine"):
            with cuda_timed_group.link(lambda *_: 5.0, copies):
                for launched in (
                    c10d.all_gather_into_tensor(x, 8, "0"),
                    c10d.reduce_scatter_tensor(x, "sum", 8, "0"),
                    c10d.all_reduce(x, "sum", "0"),
                    *c10d.all_gather_into_tensor_coalesced([x, x], 8, "0"),
                ):
                    c10d.wait_tensor(launched)
    return {}


DRY = {
    "products": gpu_fused.measure_products,
    "variants": gpu_variants.measure_variants,
    "copies": gpu_copies.measure_copies,
    "norms": gpu_fused.measure_norms,
    "schedule": _collectives,
    "costs": gpu_costs.beside_copies,
    "tests": lambda: gpu_tests.run_tests("", more=("--collect-only", "-q")),
}


class Driver:
    """What Triton asks a driver before it compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, kind: str) -> str:
        return "int"


class OnCpu(TorchFunctionMode):
    """Makes what asks for "cuda" on the CPU."""

    def __torch_function__(
        self, func: Any, kinds: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Launches:
    """In place of ``JITFunction.run``: compiles, checks the launch, notes what no H100 would
    take.
    """

    def __init__(self) -> None:
        self.count = 0
        self.problems: list[str] = []
        self.upstream = JITFunction.run

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **how: Any) -> Any:
        self.count += 1
        try:
            # The binder raises for a missing or unknown argument, the compiler for what it cannot
            # compile.
            made = self.upstream(kernel, *args, grid=grid, warmup=True, **how)
        except Exception as error:
            self.note(f"{kernel.__name__}: {type(error).__name__}: {error}")
            return None
        dims = grid(how) if callable(grid) else grid
        limits = zip((*dims, 1, 1), MOST_PROGRAMS, strict=False)
        if not all(0 < size <= most for size, most in limits):
            self.note(f"{kernel.__name__}: grid {dims} of at most {MOST_PROGRAMS}")
        if made.metadata.shared > SHARED_BYTES:
            self.note(f"{kernel.__name__}: {made.metadata.shared} bytes of shared memory")
        if made.metadata.num_warps * 32 > MOST_THREADS:
            self.note(f"{kernel.__name__}: {made.metadata.num_warps} warps")
        return made

    def note(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)


class Event:
    """An event; the time between two is never twice the same, as ratios are made of differences."""

    times = itertools.count(1)

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return float(next(self.times))


class Stream:
    """A stream with nothing on it."""

    def __init__(self, priority: int = 0) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass


@contextlib.contextmanager
def stand_in() -> Iterator[Launches]:
    """Inside, launches are compiled and checked; every time is made up, every result what memory
    held.
    """
    launches = Launches()

    def run(kernel: Any, *args: Any, **how: Any) -> Any:
        return launches.run(kernel, *args, **how)

    cuda = {
        "Event": Event,
        "Stream": Stream,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "get_device_properties": lambda *_: types.SimpleNamespace(
            multi_processor_count=MULTIPROCESSORS
        ),
    }
    # For good: there is none to go back to, and the process is the part's own.
    driver.set_active(Driver())
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        for name, instead in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, instead))
        stack.enter_context(OnCpu())
        yield launches


def gone_through(name: str) -> dict[str, Any]:
    """Go through one part on small sizes: launches counted, ``problem`` where one would fail or
    an error comes.
    """
    with contextlib.ExitStack() as stack:
        for module, field, value in (
            (gpu_timing, "REPEATS", 1),
            (gpu_timing, "WARM_UPS", 1),
            (gpu_products, "PRODUCTS", ((1024, 256, 128),)),
            (gpu_variants, "GATHERS", ((1024, 256, 128),)),
            (gpu_variants, "SCATTERS", ((1024, 256, 128),)),
            (gpu_variants, "relative_error", lambda *_: 0.0),
            (gpu_costs, "SHAPE", (1024, 256, 128)),
            (gpu_costs, "COPY_BYTES", 1 << 12),
            (gpu_copies, "ROWS", 64),
            (gpu_copies, "WIDTH", 512),
            (gpu_fused, "NORM_ROWS", (64, 32, 4)),
            (gpu_fused, "copy_gb_per_s", lambda: 1.0),
            (gpu_copies, "copy_gb_per_s", lambda: 1.0),
            # Nothing is computed, so nothing is right; and no graph is recorded.
            (gpu_fused, "TOLERANCE", float("inf")),
            (gpu_products, "relative_error", lambda *_: 0.0),
            (gpu_streams, "relative_error", lambda *_: 0.0),
            (gpu_streams.NormCase, "replay", lambda self: True),
            (torch, "compile", lambda fn: fn),
        ):
            stack.enter_context(mock.patch.object(module, field, value))
        launches = stack.enter_context(stand_in())
        found = DRY[name]()
    problems = [*launches.problems, *filter(None, [found.get("problem")])]
    return {"launches": launches.count} | ({"problem": "; ".join(problems)} if problems else {})
