"""Runs the proofs that need Triton's interpreter: chosen by an environment variable before
triton is imported.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


# Who waits for what in the kernels: a minute, which each night takes.
PROTOCOL = pytest.param("check_protocol.py", marks=pytest.mark.sweep)


@pytest.mark.parametrize("proof", ["check_numbers.py", PROTOCOL, "check_bench.py"])
def test_in_the_interpreter(proof):
    pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", HERE / proof]
    bench = HERE.parents[3] / "tools" / "bench"
    path = os.pathsep.join([str(HERE), str(bench), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
