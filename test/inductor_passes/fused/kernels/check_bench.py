"""The measurements of ``tools/bench/gpu.py`` with this process in a GPU's place: what they call,
and in which order.

Times mean nothing here. Numbers do: the emulated link sets flags, the kernel waits for them, errors
are found. By hand: TRITON_INTERPRET=1 PYTHONPATH=tools/bench pytest
test/inductor_passes/fused/kernels/check_bench.py
"""

import contextlib
import time
import types

import cuda_timed_group
import gpu
import gpu_fused
import gpu_link
import gpu_products
import gpu_streams
import gpu_timing
import pytest
import torch
import triton.language as tl
from interpreted import Schedule
from torch.overrides import TorchFunctionMode

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels.tiles import Tiles

TILES = Tiles(16, 16, 16, warps=4, stages=1)


class OnCpu(TorchFunctionMode):
    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Event:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.monotonic()

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


class Stream:
    def __init__(self, priority=0):
        pass

    def wait_stream(self, other):
        pass

    def wait_event(self, event):
        pass


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch):
    """A device of a few multiprocessors, on which a launch has ended when it returns."""
    cuda = {
        "Event": Event,
        "Stream": Stream,
        "synchronize": lambda: None,
        "current_stream": Stream,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for module in (gpu_link, gpu_timing):
        monkeypatch.setattr(
            module, "globaltimer", lambda: tl.full((), time.monotonic_ns(), tl.int64)
        )
    for module in (gpu_products, gpu_streams):
        monkeypatch.setattr(module, "BF16", torch.float32)  # the interpreter truncates bfloat16
        monkeypatch.setattr(module, "SPIN_LIMIT", 500)
    monkeypatch.setattr(gpu_products, "multiprocessors", lambda place: 18)
    monkeypatch.setattr(gpu_streams, "multiprocessors", lambda place: 8)
    monkeypatch.setattr(gpu_timing, "REPEATS", 1)
    monkeypatch.setattr(gpu_timing, "WARM_UPS", 0)
    monkeypatch.setattr(gpu_timing, "HEAD_START_NS", 0)
    with OnCpu():
        yield


@pytest.mark.parametrize(("read", "written"), [(40, 160), (160, 40), (70, 70)])
def test_a_paced_copy_moves_every_element_and_takes_its_time(monkeypatch, read, written):
    clock = lambda: tl.full((), time.monotonic_ns(), tl.int64)  # noqa: E731
    monkeypatch.setattr(cuda_timed_group, "globaltimer", clock)
    source, target = torch.randn(read), torch.full((written,), float("nan"))
    start = time.monotonic_ns()
    cuda_timed_group.paced_copy_kernel[(2,)](
        source, target, read, written, 3.0, 20_000_000, PROGRAMS=2, BLOCK=16
    )
    assert time.monotonic_ns() - start >= 20_000_000
    assert torch.equal(target, 3 * source.repeat(-(-written // read))[:written])


def test_products_beside_a_link():
    found = gpu_products.measure_all_gather_matmul(256, 32, 32, rates=(0.01,), tiles=TILES)
    (link,) = found["links"]
    assert link["largest_error"] < 1e-5
    # 224 rows of 32 numbers in 4 bytes, at a rate: nothing can be quicker than the link
    least = 224 * 32 * 4 / link["gb_per_s"] / 1e3
    assert min(link[t] for t in ("t_comm", "sequential", "chunked", "fused")) >= least
    assert not gpu_fused.wrong_numbers({"product": found})


def test_lost_flag_is_a_wrong_number_or_an_error(monkeypatch):
    case = gpu_products.GatherCase(256, 32, 32, TILES)
    assert case.error(1.0) < 1e-5
    case.link.order[3] = case.link.order[2]  # one chunk is never sent
    with pytest.raises(KernelError, match="gave up on chunk"):
        case.error(1.0)


@pytest.mark.parametrize("two_shot", [False, True])
def test_sums_and_norms(monkeypatch, two_shot):
    monkeypatch.setattr(torch, "compile", lambda fn: fn)
    monkeypatch.setattr(gpu_streams.NormCase, "replay", lambda self: True)
    with Schedule():
        found = gpu_streams.measure_norm(1.0, 8, 32, two_shot=two_shot)
    assert found["largest_error"] < 1e-5
    assert found["share_of_copy"] > 0
    found["largest_error"] = float("inf")
    assert "largest error is inf" in gpu_fused.wrong_numbers({"norm": found})[0]


def test_targets_take_the_worst_figure_and_miss_absent_ones():
    def product(fused, taken):
        link = {"taken": taken, "fused_over_longer": fused, "hidden_share": 0.9}
        return {"links": [link]}

    def variant(share, copies):
        return {"share_of_cublas": {"descriptors": share, "descriptors with copies": copies}}

    norm = {"share_of_copy": 0.5, "speedup": 2.0, "replays_keep_bits": True, "two_shot": True}
    parts = {
        "products": {"a": product(1.05, True), "b": product(2.0, False)},
        "variants": {"a": variant(0.97, 0.95), "b": variant(0.93, 0.91)},
        "schedule": {
            "rows": [
                {"variant": "ours", "copies": "engine", "over_longer": 1.2, "hidden_share": 0.95},
                {
                    "variant": "upstream",
                    "copies": "engine",
                    "over_longer": 9.0,
                    "hidden_share": 0.0,
                },
            ]
        },
        # Of one-shot, which is for small messages, no share of memory's rate is asked.
        "norms": {"large": norm, "small": norm | {"two_shot": False, "share_of_copy": 0.1}},
    }
    rows = {row["target"]: row for row in gpu.targets(parts)}
    assert rows["gather, flags preset: share of cuBLAS"]["reached"] == 0.93
    assert rows["norms, two-shot: share of copy bandwidth"]["reached"] == 0.5
    met = [row["met"] for row in rows.values()]
    assert met == [False, True, False, False, True, True, True, False, True, True]
    assert not any(row["met"] for row in gpu.targets({}))


def test_the_report_names_what_was_measured_on(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H200")
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    named = gpu.environment()
    assert named["device"] == "H200"
    assert {"date", "driver", "torch", "triton", "python", "cuda"} <= set(named)
