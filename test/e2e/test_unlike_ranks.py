"""Two real ranks that hold, compile or keep something else than each other: eager's numbers, and
nobody waits in vain.
"""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
from fuzzing.unlike.idle import Idleness  # noqa: E402 - tools are no package

pytestmark = [pytest.mark.slow, pytest.mark.main]
WORKER = Path(__file__).with_name("unlike_worker.py")
CASES = re.findall(r"^        (\w+),$", WORKER.read_text().partition("\nCASES = ")[2], re.MULTILINE)
# Nothing here has a reason to wait for the deadline: ranks that compute nothing for as long as
# IDLE_S hang.
DEADLINE_S, IDLE_S, LONGEST_S = 300, 40, 500


def start(cases, folder):
    """Two ranks, each with a log beside its results."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "INDUCTOR_PASSES_AGREEMENT_SECONDS": str(DEADLINE_S),
    }
    processes = []
    for rank in range(2):
        with (folder / f"{rank}.log").open("w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKER), str(folder), *cases],
                    env={**os.environ, **variables, "RANK": str(rank)},
                    stderr=log,
                )
            )
    return processes


def found(folder):
    files = [folder / f"{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def run(cases, folder):
    """Results of the first of ``cases``, up to one that fails; all ranks are gone when this
    returns.
    """
    folder.mkdir()
    processes = start(cases, folder)
    idleness = Idleness([process.pid for process in processes])
    end = time.monotonic() + LONGEST_S
    try:
        while any(process.poll() is None for process in processes) and time.monotonic() < end:
            failed = any(said != "ok" for rank in found(folder) for said in rank.values())
            # Once one rank has failed, its peer waits for it: what it has to say, it says soon.
            if idleness.now_s() > (3 if failed else IDLE_S):
                break
            time.sleep(0.5)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    results = found(folder)
    case = next((each for each in cases if any(r.get(each) != "ok" for r in results)), None)
    done = cases if case is None else cases[: cases.index(case) + 1]
    logs = [(folder / f"{rank}.log").read_text()[-1500:] for rank in range(2)]
    return {
        each: [r.get(each, f"no result: {log}") for r, log in zip(results, logs, strict=True)]
        for each in done
    }


@pytest.fixture(scope="module")
def said(asked, tmp_path_factory):
    """What each rank says of each case that is asked for. A case that fails costs new ranks for
    the rest.
    """
    folder = tmp_path_factory.mktemp("unlike")
    wanted = [each["case"] for each in asked]
    results = {}
    while left := [case for case in wanted if case not in results]:
        results |= run(left, folder / str(len(results)))
    return results


@pytest.mark.parametrize("case", CASES)
def test_unlike(said, case):
    assert said[case] == ["ok", "ok"]
