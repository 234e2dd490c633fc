"""Two real ranks whose programs differ: an error that names them within seconds, not a hang."""

import os
import socket
import time

import forked
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.main]

WORKER = """
import sys, torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc
from inductor_passes.inductor.session import graph_passes_only

dist.init_process_group("gloo")
differs = sys.argv[1] == "differs" and dist.get_rank() == 1

@torch.compile(backend="dynamo_dist", fullgraph=True)
def step(x):
    y = fc.all_reduce(x * 2, "sum", dist.group.WORLD)
    return fc.all_reduce(y, "max" if differs else "sum", dist.group.WORLD) + y

with graph_passes_only():
    print(step(torch.ones(4)).sum().item())
dist.destroy_process_group()
"""


def run(tmp_path, case, **variables):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        forked.Script(
            script,
            case,
            env={**os.environ, **common, "RANK": str(r), "GLOO_SOCKET_IFNAME": "lo", **variables},
        )
        for r in range(2)
    ]
    return [(*rank.communicate(timeout=300), rank.returncode) for rank in ranks]


def test_ranks_that_agree_run(tmp_path):
    for out, errors, status in run(tmp_path, "same"):
        assert (out.strip(), status) == ("48.0", 0), errors


def test_ranks_that_differ_are_told_at_once(tmp_path):
    start = time.monotonic()
    for _, errors, status in run(tmp_path, "differs"):
        assert status != 0
        assert "would launch different collectives" in errors
        assert "all_reduce sum of 16 bytes float32" in errors
        assert "all_reduce max of 16 bytes float32" in errors
    assert time.monotonic() - start < 200  # torch's own timeout is 30 minutes
