"""Real processes: one a rank, memory shared between them, every wait a true spin."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow


def run_ranks(folder, world, *arguments):
    pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")
    from inductor_passes.fused.kernels.workspace import bytes_needed

    size = bytes_needed(1 << 14)
    flags = size - 2 * (1 << 14)
    for family in ("all_reduce_add_norm", "all_gather_matmul", "matmul_reduce_scatter"):
        for rank in range(world):
            poisoned = bytes(flags) + b"\xff" * (size - flags)  # every data word is NaN
            (folder / f"{family}.{rank}").write_bytes(poisoned)
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, HERE / "rank_worker.py", folder, str(rank), str(world), *arguments],
            env=env,
            **pipes,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [json.loads(out) for out, _ in outputs]


@pytest.mark.parametrize("world", [2, 4])
def test_repeated_calls_of_skewed_ranks(tmp_path, world):
    results = run_ranks(tmp_path, world)
    assert max(result["error"] for result in results) < 1e-4
    for family in ("all_reduce_add_norm", "all_gather_matmul"):
        assert len({result["bits"][family] for result in results}) == 1, family


def test_a_rank_that_dies_is_named_on_the_others(tmp_path):
    *others, _ = run_ranks(tmp_path, 3, "dies")
    for rank, result in enumerate(others):
        assert f"all_reduce_add_norm on rank {rank} gave up on chunk 0 of rank 2" in result["error"]
        assert "expected flag 1, saw 0" in result["error"]
        assert result["nan"]
