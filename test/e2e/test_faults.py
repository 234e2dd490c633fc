"""What goes wrong around a job: no hang beyond its timeout, no wrong number, and a word on what
it was.
"""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("faults_worker.py")


def start(case, folder, rank=0, port=0, new=False, **more):
    """A rank; ``new``: by a new Python, and not by one that has torch imported."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
        "INDUCTOR_PASSES_AGREEMENT_SECONDS": "20",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "RANK": str(rank),
    }
    environment = {**os.environ, **variables}
    if not new:
        return forked.Script(WORKER, case, env=environment)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", str(WORKER), case],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def ended(process, seconds=240):
    """Output, errors and status; a process that takes longer fails the test."""
    try:
        out, errors = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return out, errors, process.returncode


def two_ranks(case, folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [ended(rank) for rank in [start(case, folder, rank, port) for rank in range(2)]]


def test_a_rank_killed_in_mid_step(tmp_path):
    survivor, killed = two_ranks("killed", tmp_path)
    assert killed[2] == -signal.SIGKILL
    assert survivor[2] > 0 and "wrong" not in survivor[0]
    assert "RuntimeError" in survivor[1] and "gloo" in survivor[1], survivor[1]


@pytest.mark.parametrize("case", ["torch", "topology", "variable"])
def test_a_rank_with_another(case, tmp_path):
    ranks = two_ranks(case, tmp_path)
    if any(status for _, _, status in ranks):
        for _, errors, status in ranks:
            assert status != 0
            assert "Ranks 0 and 1 would launch different" in errors or (
                "Ranks 1 and 0 would launch different" in errors
            ), errors
    else:
        assert [out.split() for out, _, _ in ranks] == [["right"], ["right"]]


@pytest.mark.parametrize("case", ["fork", "threads"])
def test_compiles_beside_each_other(case, tmp_path):
    out, errors, status = ended(start(case, tmp_path))
    assert (out.split(), status) == (["right"], 0), errors


def test_sigterm_during_a_compile(tmp_path):
    process = start("terminated", tmp_path, new=True)
    assert process.stdout.readline().strip() == "compiling"
    process.terminate()
    began = time.monotonic()
    _, _, status = ended(process)
    assert status == -signal.SIGTERM and time.monotonic() - began < 30
    numbers(tmp_path)  # what it left in the cache stops nobody


def numbers(folder, **more):
    out, errors, status = ended(start("code", folder, **more))
    assert status == 0, errors
    found = json.loads(out)
    assert found["right"]
    return found["sum"]


def test_caches(tmp_path):
    """Two jobs fill one folder at once; a third finds what they wrote damaged."""
    jobs = [ended(job) for job in [start("code", tmp_path) for _ in range(2)]]
    assert [status for _, _, status in jobs] == [0, 0], [errors for _, errors, _ in jobs]
    (one, other) = (json.loads(out) for out, _, _ in jobs)
    assert one == other and one["right"]
    artifacts = [p for name in ("fxgraph", "aotautograd") for p in (tmp_path / name).rglob("*")]
    damaged = [path for path in artifacts if path.is_file()]
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert numbers(tmp_path) == one["sum"]


def no_room():
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))


def test_a_full_disk(tmp_path):
    out, errors, status = ended(start("code", tmp_path, new=True, preexec_fn=no_room))
    assert status != 0 and not out
    assert "File too large" in errors, errors


def test_a_cache_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    out, errors, status = ended(start("code", tmp_path / "file" / "cache"))
    assert status != 0 and not out
    assert str(tmp_path / "file") in errors, errors
