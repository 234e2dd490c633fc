"""Parts of the measurements on a GPU as processes: one that hangs or dies is a problem, and the
others are there.
"""

import json
import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
import gpu
import gpu_parts

SAYS = {
    "well": f"print({gpu_parts.MARK!r} + '{{\"figure\": 1}}')",
    "hangs": "import time; print('begun', flush=True); time.sleep(60)",
    "dies": "import os; print('dying', flush=True); os._exit(7)",
    "silent": "print('nothing')",
}


def command(name):
    return [sys.executable, "-S", "-c", SAYS[name]]


def test_a_part_that_hangs_or_dies_loses_nothing_else(tmp_path):
    path, content = tmp_path / "gpu.json", {"device": "H100", "parts": {}}
    gpu.run_parts(list(SAYS), content, path, 60, command, limit_s=3.0)
    found = json.loads(path.read_text())["parts"]
    assert found["well"]["figure"] == 1 and "problem" not in found["well"]
    assert (found["hangs"]["problem"], found["hangs"]["said"]) == (
        "did not end within 3 s",
        "begun\n",
    )
    assert (found["dies"]["problem"], found["dies"]["said"]) == ("ended with 7", "dying\n")
    assert found["silent"]["problem"] == "said no result"
    assert not list(tmp_path.glob("*.new"))
    # What went well is not run again.
    assert list(gpu.done_in(path)) == ["well"]
    assert gpu.done_in(None) == {}


def test_what_a_part_leaves_behind_ends_with_it(tmp_path):
    file = tmp_path / "pid"
    child = "import subprocess, sys, time; p = subprocess.Popen(['sleep', '60'])"
    code = f"{child}; open({str(file)!r}, 'w').write(str(p.pid)); time.sleep(60)"
    gpu_parts.run_part([sys.executable, "-S", "-c", code], 1.0)
    pid = int(file.read_text())
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}") or _state(pid) == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"{pid} lives on")


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "Z"


def test_a_result_counts_though_its_part_hangs_afterwards():
    code = SAYS["well"] + "; import sys, time; sys.stdout.flush(); time.sleep(60)"
    found = gpu_parts.run_part([sys.executable, "-S", "-c", code], 1.0)
    assert found["figure"] == 1
    assert found["problem"] == "after its result it did not end within 1 s"


def test_parts_for_which_no_time_is_left_say_so(tmp_path):
    content = {"parts": {}}
    gpu.run_parts(["well"], content, None, 0.0, command)
    assert content["parts"]["well"] == {"problem": "no time was left for it"}


def test_a_module_that_is_not_there_is_a_problem():
    found = gpu_parts.measured_here("gpu_of_nobody:measure")
    assert found == {"problem": "not there: gpu_of_nobody.py"}


def test_parts_need_no_installation_and_wait_briefly(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("INDUCTOR_PASSES_KERNEL_WAIT_SECONDS", "3")
    environment = gpu_parts.environment_of_parts()
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["INDUCTOR_PASSES_KERNEL_WAIT_SECONDS"] == "3"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(gpu_parts.ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["products", "copies", "norms", "costs"])
def test_each_kernel_call_goes_through_binder_and_compiler(name):
    found = gpu_parts.run_part(gpu_parts.part_command(name, dry=True))
    assert "problem" not in found, found
    assert found["launches"] > 4


@pytest.mark.slow
def test_launches_that_no_device_takes_are_problems():
    code = """
import gpu_dry, gpu_parts, gpu_timing, triton
with gpu_dry.stand_in() as launches:
    gpu_timing.idle_kernel[(1, 70000)](5)
    gpu_timing.idle_kernel[(1,)]()
    gpu_timing.idle_kernel[(1,)](5, num_warps=64)
gpu_parts.print_result({"problems": launches.problems})
"""
    found = gpu_parts.run_part([sys.executable, "-c", code])
    assert "grid (1, 70000)" in found["problems"][0]
    assert "missing" in found["problems"][1]
    assert len(found["problems"]) == 3
