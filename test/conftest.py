"""What all tests share: programs on real ranks, compiles cut short, records made by hand."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.records import (
    CollectiveRecord,
    FigureRecord,
    GraphRecord,
    PassRecord,
    SpanRecord,
    TimelineRecord,
)
from inductor_passes.report import recorder

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "test" / "support"), str(ROOT / "tools")]
import preloaded  # noqa: E402 - neither folder is a package

# A first call that imports, on a loaded machine, says nothing of the property.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

# Seconds of the slow tests of a file, about: which files a run begins with, so that none of its
# processes is left with a long one at the end.
SECONDS = json.loads((ROOT / "test" / "slow_files.json").read_text())
KEPT = 3000  # characters from either end of what the ranks said


preloaded.time_no_guards()

# Compiles make many objects of which few are garbage, beside a heap of modules and tests: looking
# through all of it as often as Python does takes a fifth of a run.
gc.disable()


def pytest_collection_finish():
    """Leave what has been imported and collected out of later looks for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def pytest_collection_modifyitems(items):
    """Long files first; the order within a file, and of all others, stays."""
    items.sort(key=lambda item: -SECONDS.get(item.nodeid.partition("::")[0], 0))


@pytest.fixture
def on_ranks(tmp_path):
    """``on_ranks(worker, ranks)``: the script on that many gloo ranks, each of which must end well.

    Ranks are forked with torch imported, some seconds sooner than ``torchrun``'s. Compiled code
    goes to a folder of the test's own. A rank that fails fails the test, with what all said first
    and last.
    """

    def run(worker, ranks, *arguments, timeout=900):
        well, said = preloaded.run_ranks(
            worker,
            ranks,
            [*map(str, arguments)],
            {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
            folder=tmp_path,
            timeout_s=timeout,
        )
        assert well, shortened(said)

    return run


@pytest.fixture
def torchrun(tmp_path):
    """``torchrun(worker, ranks)``: the same as users start it."""

    def run(worker, ranks, *arguments, timeout=900, cwd=None):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        done = subprocess.run(
            [*command, f"--nproc-per-node={ranks}", str(worker), *map(str, arguments)],
            env={**os.environ, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, shortened(done.stdout + done.stderr)
        return done

    return run


def shortened(said):
    return said if len(said) <= 2 * KEPT else f"{said[:KEPT]}\n[...]\n{said[-KEPT:]}"


@pytest.fixture
def without_kernels(monkeypatch):
    """Inductor as it is, but its C++ is not built and computes nothing: seconds less a program.

    Lowering, scheduling and the generated code run, so launches are made; numbers mean nothing.
    """
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    # Nor in units, by a program that enables the plugin.
    monkeypatch.setattr("dynamo_dist.torch_compat.inductor_cpp._parts", lambda source: None)
    # Else programs are built to ask for the processor's widest vectors.
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    with fresh_cache():
        yield


def make_timeline(start_us, gather_us, peak_bytes):
    """A gather that starts then, and two products: one from 0 to 100 us, one behind the gather."""
    end = start_us + gather_us
    return TimelineRecord(
        spans=(
            SpanRecord("tp", "all_gather", "all_gather", start_us, gather_us),
            SpanRecord("compute", "mm", "compute", 0.0, 100.0),
            SpanRecord("compute", "wait_all_gather", "wait", 100.0, end - 100.0),
            SpanRecord("compute", "mm_1", "compute", end, 50.0),
        ),
        makespan_us=end + 50.0,
        compute_us=150.0,
        communication_us=gather_us,
        exposed_us=end - 100.0,
        peak_bytes=peak_bytes,
    )


def make_graph(**changes):
    """A gather that waits for nothing, then two matrix products: the second pass hides the
    gather.
    """
    fields = {
        "graph_id": "0/0:forward",
        "phase": "forward",
        "node_count": 5,
        "topology": "h100x8",
        "passes": (
            PassRecord("share_launches", "bitwise", "ran", True, {"launches_removed": 1}, 0.002),
            PassRecord("schedule", "bitwise", "ran", False, {"buckets": 0}, 0.001),
            PassRecord("fuse", "reassociating", "skipped", False, {}, 0.0, "triton is missing"),
        ),
        "collectives": (
            CollectiveRecord(
                name="all_gather",
                kind="all_gather",
                group_name="tp",
                group_size=8,
                payload_bytes=1 << 20,
                dtype="bfloat16",
                reduce_op=None,
                stack="/src/model.py:12: w = self.weight.full_tensor()",
                predicted_us=80.0,
                exposed_before_us=80.0,
                exposed_after_us=20.0,
            ),
        ),
        "before": make_timeline(100.0, 80.0, 3 << 20),
        "after": make_timeline(0.0, 120.0, 4 << 20),
        "order": ("launch all_gather tp", "kernel", "wait 0", "kernel"),
        "order_kept": True,
        "warnings": ("fuse failed and was left out",),
        "figures": (FigureRecord("busiest group's link", 80.0, "us"),),
    }
    return GraphRecord(**{**fields, **changes})


@pytest.fixture
def graph():
    return make_graph


@pytest.fixture
def graphs():
    """The records of graphs; compiles stop after the graph passes."""
    found = []
    unsubscribe = recorder.subscribe(found.append)
    with graph_passes_only():
        yield found
    unsubscribe()


@pytest.fixture
def by_upstream(monkeypatch):
    """The Inductor options of graphs that torch compiles by itself."""
    found = []

    def compile_fx(gm, inputs, config_patches=None, **how):
        found.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    return found
