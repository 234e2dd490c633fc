"""Fused operators in the code that Inductor generates, on fake CUDA tensors."""

import json
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.slow


def test_a_tensor_parallel_block_calls_the_fused_operators():
    pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")
    done = forked.run_script(Path(__file__).with_name("fused_worker.py"), timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fused"] == [
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_reduce_add_rmsnorm",
    ]
    assert [note.split()[0] for note in found["notes"]] == ["fused"] * 3
    assert all("us" in note for note in found["notes"])
    # exact=True refuses what adds in another order
    assert not [call for call in found["exact"] if call.startswith(("all_gather_matmul", "matmul"))]
    assert found["exact"].count("wait_tensor") == 3
