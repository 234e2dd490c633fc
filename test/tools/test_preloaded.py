"""Ranks that are forked with torch imported."""

import signal
import subprocess

import forked
import preloaded
import pytest

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


THREADS = """
import threading, torch
counts = [torch.get_num_threads()]
thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
thread.start()
thread.join()
print("main", counts[0], "other", counts[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(("said", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2"}, 2)])
def test_a_rank_computes_with_one_thread_if_nothing_else_is_said(
    tmp_path, monkeypatch, said, threads
):
    """What a fork says to OpenMP's own variable comes too late: it was read when torch was
    imported.
    """
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    script = tmp_path / "rank.py"
    script.write_text(THREADS)
    _, log = preloaded.run_ranks(script, 1, [], said, folder=tmp_path, timeout_s=60)
    assert f"main {threads} other {threads}" in log


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
def test_ranks_with_a_heap_spoilt_by_gloo_run_once_more(tmp_path, times):
    script, count = tmp_path / "rank.py", tmp_path / "count"
    script.write_text(SPOILT)
    well, _ = preloaded.run_ranks(
        script, 2, [str(count), f"{times}"], folder=tmp_path, timeout_s=60
    )
    assert well == (times == 1)
    assert count.read_text() == "xx"


READY = """
import gc, sys, threading
from torch._inductor import codecache
from torch._inductor.fx_passes import joint_graph, post_grad
import dynamo_dist
if __name__ == "__main__":
    made = joint_graph.lazy_init, post_grad.lazy_init
    print([each.cache_info().currsize for each in made], threading.active_count())
    print(dynamo_dist.is_enabled(), gc.get_freeze_count() > 100_000)
    before = set(sys.modules)
    dynamo_dist.enable()
    print(sorted(name for name in set(sys.modules) - before if name.startswith("dynamo_dist")))
"""


@pytest.mark.slow
def test_ranks_start_with_what_a_first_compile_makes(tmp_path):
    script = tmp_path / "ready.py"
    script.write_text(READY)
    done = forked.run_script(script, timeout=60)
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines() == ["[1, 1] 1", "False True", "[]"]


SAYS = """
import os, sys, time
if __name__ == "__main__":
    print(sys.argv[1], os.environ["ADDED"], os.getcwd(), flush=True)
    print("complains", file=sys.stderr, flush=True)
    time.sleep(float(sys.argv[1]))
    sys.exit(3)
"""


@pytest.mark.slow
def test_a_script_has_its_output_errors_folder_and_status(tmp_path):
    script = tmp_path / "says.py"
    script.write_text(SAYS)
    how = {"env": {"ADDED": "here"}, "cwd": tmp_path}
    done = forked.run_script(script, 0, **how, timeout=60)
    assert (done.stdout, done.stderr) == (f"0 here {tmp_path}\n", "complains\n")
    assert done.returncode == 3
    with pytest.raises(subprocess.TimeoutExpired):
        forked.run_script(script, 60, **how, timeout=0.5)
    process = forked.Script(script, 60, **how)
    assert process.poll() is None
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM
