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


SPOILT = """
import os, sys
from pathlib import Path
if os.environ["RANK"] == "1":
    before = Path(sys.argv[1]).read_text() if Path(sys.argv[1]).exists() else ""
    Path(sys.argv[1]).write_text(before + "x")
    if len(before) < int(sys.argv[2]):
        print("malloc(): unaligned tcache chunk detected", flush=True)
        os.abort()
"""


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 2])
def test_ranks_whose_heap_gloo_spoilt_run_once_more_and_no_oftener(tmp_path, times):
    script, count = tmp_path / "rank.py", tmp_path / "count"
    script.write_text(SPOILT)
    well, _ = preloaded.run_ranks(
        script, 2, [str(count), f"{times}"], folder=tmp_path, timeout_s=60
    )
    assert well == (times == 1)
    assert count.read_text() == "xx"
