"""``python -m dynamo_dist explain`` on scripts that know nothing of it, as real processes."""

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from dynamo_dist.diagnostics.records import json_schema

HERE = Path(__file__).parent
INSTALLED = bool(metadata.entry_points(group="torch.backends", name="dynamo_dist"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="torch calls installed packages only"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def start(cache, *command, **variables):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, timeout=300
    )


def explain(cache, *arguments):
    return start(cache, "-m", "dynamo_dist", "explain", *arguments)


def checked(text):
    data = json.loads(text)
    try:
        import jsonschema
    except ImportError:
        return data
    jsonschema.validate(data, json_schema())
    return data


def test_text_page_and_trace_of_a_script_that_exits(cache, tmp_path):
    page, trace = tmp_path / "new" / "report.html", tmp_path / "trace.json"
    done = explain(cache, "--html", page, "--trace", trace, HERE / "script_alone.py", "exit")
    assert done.returncode == 7, done.stderr
    out = done.stdout
    assert out.startswith("computed\n")
    assert "BREAK Data-dependent branching" in out
    assert "script_alone.py:17: if y.sum() > 0:" in out
    assert "torch.where(" in out
    assert "recompiled 1 time: forward (script_alone.py:14): " in out
    assert "size mismatch at index 0. expected 3, actual 4" in out
    assert "all_reduce 12 B on 0, predicted" in out
    assert "script_alone.py:16 dist.all_reduce(y)" in out
    assert "exit status: 7" in out
    assert re.search(r"compile time, Dynamo.s trace: [\d.]+ s \(measured\)", out)
    assert "<script>alert" not in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


def test_killed_script_finds_its_graphs_in_the_cache(cache):
    done = explain(cache, "--json", HERE / "script_alone.py", "crash")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert "computed" in done.stderr
    (report,) = checked(done.stdout)["reports"]
    assert [b["cause"] for b in report["breaks"]] == ["data_dependent_branch"]
    assert [c["kind"] for g in report["graphs"] for c in g["collectives"]] == ["all_reduce"] * 2
    facts = {fact["name"]: fact["value"] for fact in report["facts"]}
    assert facts["exit status"] == "killed by SIGKILL"
    assert facts["functions compiled"] == 2


def torchrun(cache, *arguments):
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    explain = ("-m", "dynamo_dist", "explain", "--json", *arguments)
    return start(cache, *command, *explain)


def differences(merged):
    return {d["what"]: [v["ranks"] for v in d["values"]] for d in merged["differences"]}


def test_ranks_under_torchrun_of_which_one_differs_and_fails(cache):
    done = torchrun(cache, "--backend", "dynamo_dist", HERE / "script_of_ranks.py", "run", "fail")
    assert done.returncode == 1, done.stderr
    assert "ValueError: rank 1 fails" in done.stderr
    merged = checked(done.stdout)
    assert merged["missing"] == []
    assert differences(merged)["graph breaks"] == [[0], [1]]
    first, second = merged["reports"]
    assert first["breaks"] == [] and second["breaks"][0]["effect"] == "split"
    (gather,) = first["graphs"][0]["collectives"]
    assert gather["cause"] == "Shard(0) -> Replicate() on tp"
    assert gather["stack"].endswith(
        "y = torch.relu(x @ w.redistribute(placements=[Replicate()]).to_local())"
    )
    assert [p["name"] for p in first["graphs"][0]["passes"]]
    assert [r["facts"][0]["value"] for r in merged["reports"]] == ["0", "1"]


@pytest.mark.sweep  # torchrun's ranks come into one report above
def test_ranks_that_no_torchrun_started_come_into_one_report(cache):
    """As a shell, srun or mpirun starts them: rank 0's command shows all, the other's nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launched = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with concurrent.futures.ThreadPoolExecutor() as threads:
        done = [
            threads.submit(
                start,
                cache,
                *("-m", "dynamo_dist", "explain", "--json", HERE / "script_of_ranks.py", "run"),
                RANK=str(rank),
                **launched,
            )
            for rank in (0, 1)
        ]
    first, second = (process.result() for process in done)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    merged = checked(first.stdout)
    assert [report["rank"] for report in merged["reports"]] == [0, 1]
    assert differences(merged)["graph breaks"] == [[0], [1]]


def test_processes_that_the_script_starts_are_ranks_too(cache, tmp_path):
    done = explain(cache, "--json", HERE / "script_of_ranks.py", "spawn", tmp_path / "store")
    assert done.returncode == 0, done.stderr
    merged = checked(done.stdout)
    assert merged["missing"] == []
    assert differences(merged)["graph breaks"] == [[0], [1]]
    for report in merged["reports"]:
        (gather,) = report["graphs"][0]["collectives"]
        assert gather["cause"] == "Shard(0) -> Replicate() on tp"
        assert report["graphs"][0]["passes"] == []  # upstream's backend: looked at, not changed
