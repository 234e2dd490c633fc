"""Losses, convolutions and the rest on four real gloo ranks, where a collective that is lost shows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_forward_and_backward_equal_one_device():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    env = {**os.environ, "PYTHONPATH": str(WORKER.parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER)], env=env, capture_output=True, text=True, timeout=420
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
