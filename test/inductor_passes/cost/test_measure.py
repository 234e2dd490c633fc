"""Measuring itself: real ranks, small; and what goes wrong is one line."""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from inductor_passes.__main__ import main
from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.measure_device import CpuClock, measure_device, typical_us
from inductor_passes.cost.measured_topology import run_ranks

ROOT = Path(__file__).parents[3]
MEASURE = ("-m", "inductor_passes", "costs", "measure")


def run(*command, timeout_s=120, **environment):
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, **variables, **environment},
    )


class TableClock(CpuClock):
    """A clock on which calls take given microseconds, in turn."""

    def __init__(self, times):
        super().__init__()
        self.times, self.calls = iter(times), []

    def sample(self, call, calls):
        self.calls.append(calls)
        return next(self.times)


def test_short_calls_are_repeated_and_long_ones_are_not():
    short = TableClock([10.0, 12.0, 11.0, 13.0, 12.0, 14.0])
    assert typical_us(short, lambda: None, budget_us=10_000) == 11.0
    assert short.calls == [1] + [200] * 5
    long = TableClock([1e6, *[2e6] * 5])
    assert typical_us(long, lambda: None, budget_us=10_000) == 2e6
    assert long.calls == [1] * 6


def test_a_device_alone():
    times = measure_device(CpuClock(), seconds=0.01)
    assert {"float32", "float64"} <= times.products.keys() and "float8" not in times.products
    rate, shape = times.tflops("float32")
    assert rate > 0 and shape in times.products["float32"]
    assert min(times.attention_us, times.copy_us, times.kernel_us) > 0


@pytest.mark.slow
def test_two_ranks_of_this_host(tmp_path):
    out = tmp_path / "mine.json"
    done = run(*MEASURE, "--out", out, "--seconds", 2, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["topology"] == "mine"
    assert {row["table"] for row in said["tables"]} >= {"all_to_all, 2 ranks on 1 nodes"}
    topology = load_topology(out)
    content = json.loads(out.read_text())
    assert len(content["links"]["measured"]) == 4
    for entry in content["links"]["measured"]:
        times = [us for _, us in entry["points"]]
        for payload, us in entry["points"]:
            found = collective_us(entry["kind"], payload, GroupShape(2, 1), topology)
            # A smaller one can take what a larger one took, where noise turned them around.
            assert found == pytest.approx(us, rel=0.01) or found == min(times[times.index(us) :])
    assert topology.measured_product_us("float32", (1, 64, 64, 64), 0.0)


JOB = """
import os, socket, sys
# Two hosts of two ranks, by name.
socket.gethostname = lambda: f"host{int(os.environ['RANK']) // 2}"
from inductor_passes.__main__ import main
sys.exit(main(["costs", "measure", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_job_of_two_hosts_under_torchrun(tmp_path):
    out, script = tmp_path / "job.json", tmp_path / "job.py"
    script.write_text(JOB)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4)
    done = run(*launcher, script, "--out", out, "--seconds", 2, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("topology 'job'") == 1  # the first rank alone
    topology = load_topology(out)
    assert topology.ranks_per_node == 2
    shapes = {(c.ranks, c.nodes) for c in topology.collectives}
    assert shapes == {(2, 1), (2, 2), (4, 2)}
    assert dict(topology.sources)["links.inter_node_gb_per_s"].startswith("measured")


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named_in_one_line(tmp_path):
    job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29731"}
    done = run(*MEASURE, "--device", "cpu", "--timeout", 2, "--out", tmp_path / "x.json", **job)
    assert done.returncode == 1 and not (tmp_path / "x.json").exists()
    assert "The ranks of the job did not come together within 2 s." in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_rank_that_dies_is_named(capsys):
    assert run_ranks(2, functools.partial(os._exit, 9), 30.0, "cpu") == 1
    assert re.fullmatch(r"error: rank [01] is gone \(exit code 9\)\.\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--out", "/nowhere/at/all.json"], 1, "Cannot write '/nowhere/at/all.json'"),
        (["--seconds", "0"], 1, "--seconds, --timeout and --ranks are above zero."),
        (["--base", "no-such"], 2, "Cannot read topology 'no-such'"),
    ],
)
def test_a_mistake_is_said_before_anything_is_measured(arguments, status, message, capsys):
    assert main(["costs", "measure", "--device", "cpu", *arguments]) == status
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said and said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_gpu_that_is_not_there(capsys):
    assert main(["costs", "measure", "--device", "cuda"]) == 1
    assert "There is no CUDA device here." in capsys.readouterr().err
