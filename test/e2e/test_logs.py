"""TORCH_LOGS and TORCH_TRACE in real processes, on a cold and on a warm cache."""

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from dynamo_dist import autoload

INSTALLED = bool(metadata.entry_points(group="torch.backends", name="dynamo_dist"))
CHILD = Path(__file__).with_name("logs_child.py")
LINE = "logs_child.py:18: y = (x @ w).redistribute(placements=[Shard(0)]).to_local()"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.main,
    pytest.mark.skipif(not INSTALLED, reason="the backend is named by an installed package only"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


def run(folder, names, trace="", **more):
    env = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
        "TORCH_LOGS": names,
        **({"TORCH_TRACE": str(folder / trace)} if trace else {}),
        **more,
    }
    done = subprocess.run(
        [sys.executable, CHILD], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def cold(folder):
    """What a first process logs, traced too: under the short names."""
    return run(folder, ",".join(autoload.ARTIFACTS), "trace")


def modules():
    from dynamo_dist.diagnostics import live
    from inductor_passes.report import logs as passes_logs

    return ",".join(f"+{m}" for m in (*live.MODULES.values(), *passes_logs.modules().values()))


def check(logged):
    assert "Data-dependent branching (split) at " in logged
    assert "y = torch.where(" in logged
    assert "3 steps changed by " in logged
    assert "makespan " in logged and "order kept" in logged
    assert "reduce_scatter of 512 bytes on 0, 4 ranks; Partial(sum) -> Shard(0) on tp" in logged
    assert LINE in logged
    assert "fuse_matmul_reduce_scatter: declined reduce_scatter" in logged


def test_each_decision_is_logged(cold):
    check(cold)
    for artifact in autoload.ARTIFACTS:
        assert f"[__{artifact}]" in cold


def test_names_of_modules_on_a_warm_cache(cold, folder):
    check(run(folder, modules(), "warm"))


def test_one_name_gives_one_kind_of_line(cold, folder):
    logged = run(folder, "dist_schedule")
    assert "makespan " in logged
    assert "Data-dependent" not in logged and "reduce_scatter of" not in logged


@pytest.mark.parametrize("trace", ["trace", "warm"])
def test_tlparse_shows_graphs_and_reports_beside_torch_s(cold, folder, trace):
    tlparse = shutil.which("tlparse", path=sysconfig.get_path("scripts"))
    if tlparse is None:
        pytest.skip("tlparse is not installed (pip install dynamo-dist[test])")
    if trace == "warm" and not (folder / trace).exists():
        run(folder, "", trace)
    (log,) = (folder / trace).iterdir()
    out = folder / f"{trace}_parsed"
    command = [tlparse, "--no-browser", log, "-o", out]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    index = (out / "index.html").read_text()
    names = ["dynamo_dist_graph_break", "dynamo_dist_plan", "inductor_passes_inference_report"]
    if trace == "trace":  # on a warm cache no pass sees a graph
        names += ["inductor_passes_inference_graph_before", "inductor_passes_inference_graph_after"]
    for name in names:
        (found,) = out.glob(f"*/{name}_*")
        assert found.read_text()
        assert f"{found.parent.name}/{found.name}" in index
