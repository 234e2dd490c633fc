"""The scenarios of ``ranks_worker.py`` on four real ranks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_losses_and_weights_are_those_of_torchs_wrappers():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    env = {**os.environ, "PYTHONPATH": str(WORKER.parents[3]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER)], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
