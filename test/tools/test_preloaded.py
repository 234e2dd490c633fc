"""Ranks that are forked with torch imported."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import preloaded

RANK = """
import os, sys, torch, torch.distributed as dist
if __name__ == "__main__":
    dist.init_process_group("gloo")
    total = torch.ones(1) * dist.get_rank()
    dist.all_reduce(total)
    print(sys.argv[1], os.environ["ADDED"], "sum", int(total))
    if dist.get_rank() == int(sys.argv[1]):
        raise SystemExit(3)
    dist.barrier()
    dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("fails", [-1, 1])
def test_ranks_of_a_script(tmp_path, fails):
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    well, said = preloaded.run_ranks(
        script, 2, [f"{fails}"], {"ADDED": "here"}, folder=tmp_path, timeout_s=60
    )
    assert well == (fails < 0)
    assert said.count(f"{fails} here sum 1") == 2
    assert ("rank 1, exit status 3" in said) == (fails == 1)
    assert "ADDED" not in preloaded.os.environ
