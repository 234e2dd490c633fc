"""The programs of ``gloo_programs`` on four real ranks: on each, compiled gives what eager gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gloo_worker.py")
SIZE = 4


@pytest.mark.slow
def test_every_rank_equals_eager(tmp_path):
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(SIZE)]
    assert len(results[0]) > 20
    for rank, result in enumerate(results):
        assert {name: what for name, what in result.items() if what} == {}, f"rank {rank}"
