"""Measure one device: matrix products, attention, copies, the start of a kernel, and kernels beside
a collective.

How often a call is repeated depends on how long it takes, and so on a clock; ranks that repeated a
collective unequally often would hang. The ranks therefore agree on every count before they use it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F

from inductor_passes.cost.topology import Product

Timed = Callable[[], object]
WARM_UP = 2
LEAST_SAMPLES, MOST_SAMPLES = 5, 60
MOST_CALLS = 200
# More than the second-level cache of any GPU; and writing it takes longer than the host needs for a
# launch.
FLUSH_BYTES = 1 << 30


class Clock(Protocol):
    """Clock of one kind of device.

    ``sample_us``: a sample repeats a shorter call until it lasts about so long. ``across``: what
    the ranks of a group make of their times of one collective.
    """

    device: torch.device
    sample_us: float
    across: dist.ReduceOp.RedOpType
    how: str

    def sample(self, call: Timed, calls: int) -> float:
        """Microseconds of one of ``calls`` calls in a row, which all ranks start together."""

    def summary(self, samples: Sequence[float]) -> float:
        """The time that counts."""


class CpuClock:
    """Time on the wall. The best sample counts: what else runs on a host only ever adds time."""

    device = torch.device("cpu")
    sample_us = 2000.0
    # A step goes on when its slowest rank does.
    across = dist.ReduceOp.MAX

    def __init__(
        self, summary: Callable[[Sequence[float]], float] = min, how: str = "best"
    ) -> None:
        self._summary, self.how = summary, how

    def sample(self, call: Timed, calls: int) -> float:
        meet(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6

    def summary(self, samples: Sequence[float]) -> float:
        return self._summary(samples)


class CudaClock:
    """CUDA events around one call. The median counts.

    Before each sample the cache is flushed; while that runs, the host queues the events and the
    call between them, so that its own pace does not count.
    """

    sample_us = 0.0
    # A rank that comes early waits inside the kernel; no rank takes less than the work.
    across = dist.ReduceOp.MIN
    how = "median"

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def sample(self, call: Timed, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        meet(self.device)
        self._flush.zero_()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls * 1e3

    def summary(self, samples: Sequence[float]) -> float:
        return statistics.median(samples)


def typical_us(
    clock: Clock, call: Timed, budget_us: float, group: dist.ProcessGroup | None = None
) -> float:
    """Microseconds of ``call`` on the slowest rank of the job, measured within about ``budget_us``.

    ``group``: the call is a collective on it. At least ``LEAST_SAMPLES`` are taken, however long
    they take.
    """
    for _ in range(WARM_UP):
        call()
    once = slowest([clock.sample(call, 1)], clock.device)[0]
    calls = min(max(int(clock.sample_us / once), 1), MOST_CALLS)
    fitting = int(budget_us / (once * calls))
    samples = min(max(fitting, LEAST_SAMPLES), MOST_SAMPLES)
    times = [clock.sample(call, calls) for _ in range(samples)]
    if group is not None:
        times = combined(times, clock.device, clock.across, group)
    return slowest([clock.summary(times)], clock.device)[0]


def repeated(call: Timed, times: int, device: torch.device) -> Timed:
    """A call that does ``call`` many times; on a GPU as one CUDA graph, so that the host's pace
    does not count.
    """
    if device.type == "cuda":
        call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Not "global": NCCL's watchdog asks for events from a thread of its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                call()
        return graph.replay

    def many() -> None:
        for _ in range(times):
            call()

    return many


def meet(device: torch.device) -> None:
    """Let the ranks of the job start together."""
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks."""
    if not dist.is_initialized():
        return list(values)
    return combined(values, device, dist.ReduceOp.MAX, None)


def combined(
    values: Sequence[float],
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> list[float]:
    """Each value, combined over the ranks of a group; None is the whole job."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation, group)
    return tensor.tolist()


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

    ``points``: microseconds of the collective by payload. ``launch_of`` gives, for a payload, what
    launches it. Products that take about as long as the collective are timed alone and beside it.
    Every rank of the job calls this, with equal arguments.
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


Note = Callable[[str], None]
DTYPES = ("float32", "float64", "bfloat16", "float16", "float8")
# Batch, m, k, n: cubes, and what stands in models: few rows, wide and narrow, and a batch of small
# ones.
PRODUCTS: tuple[Product, ...] = (
    (1, 64, 64, 64),
    (1, 128, 128, 128),
    (1, 16, 512, 512),
    (1, 256, 256, 256),
    (8, 128, 64, 128),
    (1, 256, 256, 1024),
    (1, 512, 512, 512),
    (1, 1024, 1024, 1024),
)
CUDA_PRODUCTS: tuple[Product, ...] = (
    (1, 256, 256, 256),
    (1, 512, 512, 512),
    (1, 16, 4096, 4096),
    (1, 1024, 1024, 1024),
    (32, 1024, 128, 1024),
    (1, 2048, 2048, 2048),
    (1, 4096, 4096, 1024),
    (1, 4096, 4096, 4096),
    (1, 4096, 4096, 14336),
    (1, 4096, 14336, 4096),
    (1, 8192, 8192, 8192),
)
SMALL_KERNELS = 200
COPY_BYTES, CUDA_COPY_BYTES = 64 << 20, 1 << 30
# Batch, heads, sequence, head's width.
ATTENTION, CUDA_ATTENTION = (1, 4, 512, 64), (2, 16, 4096, 128)


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Times of one device. ``products``: dtype -> (batch, m, k, n) -> microseconds, slowest rank.

    ``attention_dtype``: what attention was computed in. ``copy_bytes``: read, and as many written.
    """

    how: str
    products: dict[str, dict[Product, float]] = field(default_factory=dict)
    attention_dtype: str = "float32"
    attention_flops: float = 0.0
    attention_us: float = 0.0
    copy_bytes: int = 0
    copy_us: float = 0.0
    kernel_us: float = 0.0

    def tflops(self, dtype: str) -> tuple[float, Product]:
        """The best rate that was reached in a dtype, and the product that reached it."""
        rates = {shape: flops_of(shape) / us / 1e6 for shape, us in self.products[dtype].items()}
        best = max(rates, key=rates.__getitem__)
        return rates[best], best


def flops_of(shape: Product) -> float:
    """Operations of a product, a multiplication and an addition counted as two."""
    return 2.0 * math.prod(shape)


def measure_device(
    clock: Clock, *, seconds: float = 30.0, note: Note = lambda text: None
) -> DeviceTimes:
    """Measure one device. In an initialised job, all ranks measure at the same time.

    They do so because they also compute at the same time in the job. Dtypes and shapes share the
    total of ``seconds``. A product that would take more than its share is left out, and so is a
    dtype that the device cannot multiply. ``note`` is called with the name of each step before its
    measurement.
    """
    on_gpu = clock.device.type == "cuda"
    shapes = CUDA_PRODUCTS if on_gpu else PRODUCTS
    share_us = seconds * 1e6 / (len(DTYPES) * len(shapes) + 3)
    products = {}
    for dtype in DTYPES:
        note(f"products, {dtype}")
        if found := _products(clock, dtype, shapes, share_us):
            products[dtype] = found
    note("attention, copies, small kernels")
    batch, heads, sequence, width = CUDA_ATTENTION if on_gpu else ATTENTION
    dtype = "bfloat16" if on_gpu else "float32"
    q = torch.randn(batch, heads, sequence, width, device=clock.device, dtype=getattr(torch, dtype))
    source = torch.ones((CUDA_COPY_BYTES if on_gpu else COPY_BYTES) // 4, device=clock.device)
    target = torch.empty_like(source)
    small = torch.ones(16, device=clock.device)
    adds = repeated(lambda: torch.add(small, small, out=small), SMALL_KERNELS, clock.device)
    return DeviceTimes(
        how=clock.how,
        products=products,
        attention_dtype=dtype,
        attention_flops=4.0 * batch * heads * sequence**2 * width,
        attention_us=typical_us(clock, lambda: F.scaled_dot_product_attention(q, q, q), share_us),
        copy_bytes=source.nbytes,
        copy_us=typical_us(clock, lambda: target.copy_(source), share_us),
        kernel_us=typical_us(clock, adds, share_us) / SMALL_KERNELS,
    )


def part_count() -> int:
    """Times that ``measure_device`` calls ``note``."""
    return len(DTYPES) + 1


def _products(
    clock: Clock, dtype: str, shapes: tuple[Product, ...], share_us: float
) -> dict[Product, float]:
    found: dict[Product, float] = {}
    rate = math.inf  # operations a microsecond, of the largest so far
    for shape in sorted(shapes, key=flops_of):
        # Shapes are sorted by flops, so all later ones would take longer still.
        if flops_of(shape) / rate * (WARM_UP + LEAST_SAMPLES) > share_us:
            break
        call = _product(dtype, shape, clock.device)
        # One rank that cannot, of a job of unlike devices, is enough: the others would wait for it.
        if slowest([float(call is None)], clock.device)[0] or call is None:
            continue
        found[shape] = typical_us(clock, call, share_us)
        rate = flops_of(shape) / found[shape]
    return found


def _product(dtype: str, shape: Product, device: torch.device) -> Callable[[], object] | None:
    """A product to time; None where the device has none of that dtype, or none of that shape in
    it.
    """
    b, m, k, n = shape
    try:
        if dtype == "float8":
            call = _product_float8(b, m, k, n, device)
        else:
            kind = getattr(torch, dtype)
            left = torch.randn(b, m, k, device=device).to(kind)
            right = torch.randn(b, k, n, device=device).to(kind)
            if b == 1:
                left, right = left[0], right[0]

            def call() -> object:
                return left @ right

        call()
    except (RuntimeError, ValueError):
        return None
    return call


def _product_float8(b: int, m: int, k: int, n: int, device: torch.device) -> Callable[[], object]:
    """A product of 8-bit floats, which is not batched and wants the right matrix column by
    column.
    """
    if b != 1 or device.type != "cuda":
        raise ValueError(
            "8-bit floats are multiplied two matrices at a time, and on a CPU by emulation"
        )
    left = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=device)
    whole = F.ScalingType.TensorWise
    return lambda: F.scaled_mm(left, right, one, whole, one, whole)
