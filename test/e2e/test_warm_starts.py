"""Ranks that share one cache folder: in a second job each finds what it compiled in the first,
and no other's; by torch's artefacts, without that folder too.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("warm_worker.py")
RANKS = 2
# Entries of AOTAutograd's cache and of Inductor's.
COMPILED = {
    "tensor_parallel": [1, 2],
    "rows_of_its_own": [1, 2],
    "uneven_rows": [1, 2],
    "a_dtensor_that_leaves": [1, 1],
    "sharded_blocks": [1, 2],
    "averaged": [1, 2],
}
NOTHING = {name: [0, 0] for name in COMPILED}


def job(folder, **variables):
    """What each rank of a new job says, all with ``folder``'s caches. Processes hash with seeds
    of their own.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = [folder / f"{rank}.json" for rank in range(RANKS)]
    processes = []
    for rank, file in enumerate(said):
        file.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            **variables,
        }
        environment.pop("PYTHONHASHSEED", None)
        with (folder / f"{rank}.log").open("w") as log:
            command = [sys.executable, str(WORKER), str(folder)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    try:
        for rank, process in enumerate(processes):
            assert process.wait(300) == 0, (folder / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
    return [json.loads(file.read_text()) for file in said]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    return job(folder, ARTEFACTS="save"), job(folder), folder


def what(found, field):
    return [{name: each[field] for name, each in rank.items()} for rank in found]


def test_numbers_are_eagers_in_both(jobs):
    assert all(all(rank.values()) for found in jobs[:2] for rank in what(found, "right"))


def test_the_second_finds_all_that_the_first_compiled(jobs):
    first, second, _ = jobs
    assert what(second, "hits") == [COMPILED] * RANKS
    assert what(second, "misses") == [NOTHING] * RANKS
    # Some rank has compiled each graph, and others may have found it then.
    for name, (_, graphs) in COMPILED.items():
        lowered = sum(rank[name] for rank in what(first, "lowered"))
        assert graphs <= lowered <= RANKS * graphs
    assert not any(any(rank.values()) for rank in what(second, "lowered"))


def test_torchs_artefacts_carry_all_to_a_host_with_empty_caches(jobs):
    folder = jobs[-1]
    found = job(folder, ARTEFACTS="load", TORCHINDUCTOR_CACHE_DIR=str(folder / "another"))
    assert all(all(rank.values()) for rank in what(found, "right"))
    assert what(found, "hits") == [COMPILED] * RANKS
    assert what(found, "misses") == [NOTHING] * RANKS
    assert not any(any(rank.values()) for rank in what(found, "lowered"))


def test_ranks_take_each_others_graph_without_the_rank_in_keys(tmp_path):
    planted = [job(tmp_path, PLANTED="1") for _ in range(2)][-1]
    assert what(planted, "misses") == [{"rows_of_its_own": [0, 0]}] * RANKS
    assert not all(rank["rows_of_its_own"] for rank in what(planted, "right"))
