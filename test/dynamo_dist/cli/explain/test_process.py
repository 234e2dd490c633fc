"""A script in a process of its own: exit status, signals, no orphan."""

import os
import signal
import subprocess
import sys
import time

import pytest

from dynamo_dist.cli.explain import running

WAITS = "import sys, time; print('ready', flush=True); time.sleep(60)"
COUNTS = """
import signal, sys, time
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.2)
sys.exit(len(seen))
"""


def status_of(code):
    with running([sys.executable, "-c", code], os.environ) as wait:
        return wait()


@pytest.mark.parametrize("status", [0, 3])
def test_the_exit_status_is_the_script_s(status):
    assert status_of(f"import os; os._exit({status})") == status


def test_a_script_that_was_killed(capfd):
    assert status_of("import os; os.abort()") == -signal.SIGABRT


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    status_of("")
    assert signal.getsignal(signal.SIGTERM) is before


def launcher(code, *, tail=""):
    """A process that runs ``code`` as we run a script, says its exit status, and then runs
    ``tail``.
    """
    body = f"""
import os, signal, sys, time
from dynamo_dist.cli.explain import end_like, running
with running([sys.executable, "-c", {code!r}], os.environ) as wait:
    status = wait()
    print("status", status, flush=True)
    {tail or "pass"}
sys.exit(end_like(status))
"""
    process = subprocess.Popen(
        [sys.executable, "-c", body], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_signal_reaches_the_script_once():
    process = launcher(COUNTS)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("status 1\n", 1)


def test_we_end_by_the_signal_that_ended_the_script():
    process = launcher(WAITS)
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == (f"status {-signal.SIGTERM}\n", -signal.SIGTERM)


def test_signal_after_the_scripts_end_keeps_the_report():
    process = launcher("print('ready', flush=True)", tail="time.sleep(1); print('done')")
    assert process.stdout.readline() == "status 0\n"
    process.terminate()
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("done\n", 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
def test_a_killed_launcher_leaves_no_script_behind():
    process = launcher(
        "import os, time; print('ready', flush=True); print(os.getpid(), flush=True); "
        "time.sleep(60)"
    )
    script = int(process.stdout.readline())
    process.kill()
    process.wait(30)
    for _ in range(100):
        try:
            os.kill(script, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{script}/stat") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "Z":  # dead, not yet reaped
                return
        time.sleep(0.05)
    pytest.fail("the script still runs")
