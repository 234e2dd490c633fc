"""``torchrun --nnodes 2`` over two hosts: network namespaces of this machine, joined by a link."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("two_hosts_worker.py")
SLOWER_S = 3.0  # what a pass takes longer on the second host


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "demo"))
    import link

    try:
        with link.two_hosts("1gbit") as made:
            yield made
    except link.CannotEmulate as error:
        pytest.skip(str(error))


def torchrun(hosts, caches, *, what=("1", str(SLOWER_S)), seconds=400):
    """What the ranks printed, of which each host has one. ``caches``: the folders of each host,
    one for each step.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
    line += ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts[0].address}:29400", "--rdzv-id=job"]
    script = [str(WORKER), *what]
    started = []
    for host, folders in zip(hosts, caches, strict=True):
        # Real hosts are told apart by name; these two share one.
        first = str(host is hosts[0]).lower()
        own = [*line, f"--local-addr={host.address}", f"--rdzv-conf=is_host={first}"]
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "GLOO_SOCKET_IFNAME": host.interface,
            "PYTHONWARNINGS": "ignore",
        }
        started.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host.namespace, *own, *script, *folders],
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
    ranks = {}
    try:
        for process in started:
            out, errors = process.communicate(timeout=seconds)
            assert process.returncode == 0, errors[-3000:]
            for record in map(json.loads, (row for row in out.splitlines() if row[:1] == "{")):
                ranks[record["rank"]] = record
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [ranks[rank] for rank in range(2)]


@pytest.mark.sweep  # the other test has both hosts and both kinds of folder
def test_hosts_of_which_one_compiles_slower(hosts, tmp_path):
    """One step with a cache that the hosts share, and one with a cache for each of them; then
    both from these.
    """
    caches = [[str(tmp_path / "of_both"), str(tmp_path / f"of_host{at}")] for at in range(2)]
    cold = torchrun(hosts, caches)
    assert [rank["host"] for rank in cold] == [0, 1]
    assert all(step["close"] for rank in cold for step in rank["steps"])
    warm = torchrun(hosts, caches)
    assert all(step["close"] and step["hits"] for rank in warm for step in rank["steps"]), warm


def test_one_host_compiles_for_both(hosts, tmp_path):
    """Through a folder that the hosts share, and through the job's store where each has its own."""
    caches = [[str(tmp_path / "of_both"), str(tmp_path / f"of_host{at}")] for at in range(2)]
    ranks = torchrun(hosts, caches, what=("shared",))
    assert all(step["close"] for rank in ranks for step in rank["steps"])
    for at in range(2):  # forward and backward
        assert sorted(rank["steps"][at]["lowered"] for rank in ranks) == [0, 2], ranks
