"""``compile="shared"`` on four ranks of a 2x2 mesh: one compile for equal graphs, each its own
for others, whoever dies.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("shared_worker.py")
RANKS = 4


def job(folder, what, *, apart=False, dies=None):
    """What each rank of a job says; ``apart``: each has a cache folder of its own. ``dies``: the
    rank that is killed.

    Ranks of the job that runs all programs hash with seeds of their own, as those of real jobs do.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        cache = folder / (f"cache{rank}" if apart else "cache")
        environment = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
        }
        log = folder / f"{rank}.log"
        if what != "together":
            processes.append(forked.Script(WORKER, folder, what, env=environment, together=log))
            continue
        command = [sys.executable, str(WORKER), str(folder), what]
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=file))
    try:
        if dies == "all":
            at = next(_first_dead(processes))
            assert processes[at].wait(1) == -9
            return []
        for rank, process in enumerate(processes):
            code = process.wait(300)
            assert code == (-9 if rank == dies else 0), (folder / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in processes:
            process.kill()
    living = (rank for rank in range(RANKS) if rank != dies)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in living]


def _first_dead(processes, seconds=120):
    """Wait for a process to end; the others are then killed by whoever waits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield from (at for at, process in enumerate(processes) if process.poll() is not None)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return job(tmp_path_factory.mktemp("together"), "together")


def lowered(found, case):
    """How many graphs ranks have compiled, all together."""
    return sum(rank[case]["lowered"] for rank in found)


def test_numbers_are_eagers(together):
    assert all(case["right"] for rank in together for case in rank.values())


def test_equal_graphs_are_compiled_once(together):
    assert lowered(together, "tensor_parallel") == 2  # forward and backward
    assert lowered(together, "over_both_dimensions") == 1


def partitioned(found, case):
    """How many joint graphs ranks have made a forward and a backward graph of, all together."""
    return sum(rank[case]["partitioned"] for rank in found)


def test_equal_joint_graphs_are_partitioned_once(together):
    assert partitioned(together, "tensor_parallel") == 1
    assert partitioned(together, "its_own_mesh_in_a_result") == 1
    assert partitioned(together, "its_own_place_in_training") == 2


def traced(found, case):
    """How many ranks have had AOTAutograd trace a joint graph, and looked who else has it."""
    return sum(rank[case]["traced"] for rank in found)


def test_what_reads_no_rank_is_traced_by_one(together):
    assert traced(together, "tensor_parallel") == 1
    assert traced(together, "its_own_mesh_in_a_result") == 1


@pytest.mark.parametrize(
    ("case", "codes"), [("vocabulary", 2), ("uneven_inside", RANKS), ("operator_of_a_user", RANKS)]
)
def test_each_rank_traces_what_reads_its_rank_in_tracing(together, case, codes):
    assert partitioned(together, case) == codes


def test_the_report_says_which_rank_compiled(together):
    said = sorted(rank["tensor_parallel"]["caches"][0] for rank in together)
    assert [each.partition(":")[0] for each in said] == ["hit", "hit", "hit", "miss"]
    assert any(each.startswith("hit: the compile of rank ") for each in said)


def test_ranks_with_another_batch_compile_another_graph(together):
    assert (
        lowered(together, "a_longer_batch_on_one_row") == 2
    )  # those of the others are in the cache


# A pass asks which of the rows are this rank's own: the rank stays in the key.
@pytest.mark.parametrize("case", ["rank_read", "environment", "own_rows"])
def test_what_holds_its_rank_as_a_number_is_compiled_by_each(together, case):
    assert lowered(together, case) == RANKS


@pytest.mark.parametrize("case", ["rank_of_a_dimension", "coordinate"])
def test_code_with_a_coordinate_compiles_once_a_coordinate(together, case):
    assert lowered(together, case) == 2


def test_folders_of_their_own_get_the_code_through_the_store(tmp_path):
    found = job(tmp_path, "apart", apart=True)
    assert all(rank["tensor_parallel"]["right"] for rank in found)
    written = [
        len(list(Path(tmp_path, f"cache{rank}", "fxgraph").rglob("*"))) for rank in range(RANKS)
    ]
    assert all(written)
    assert lowered(found, "tensor_parallel") == 2


def test_who_waits_hears_of_code_from_a_cache(tmp_path):
    """The program is traced anew, and its graphs are in Inductor's cache: settling them takes no
    rank's deadline.
    """
    job(tmp_path, "alone")
    shutil.rmtree(tmp_path / "cache" / "aotautograd")
    found = job(tmp_path, "alone")
    assert all(rank["tensor_parallel"]["right"] for rank in found)
    assert lowered(found, "tensor_parallel") == 0 and partitioned(found, "tensor_parallel") == 1
    assert max(rank["tensor_parallel"]["seconds"] for rank in found) < 20


@pytest.mark.parametrize("what", ["killed", "killed in training"])
def test_the_next_compiles_where_the_compiling_rank_is_killed(tmp_path, what):
    found = job(tmp_path, what, dies=3)
    assert all(rank["killed"]["right"] for rank in found)
    assert all(rank["killed"]["seconds"] < 60 for rank in found)


def test_job_killed_midway_starts_again_from_its_folder(tmp_path):
    """The rank that compiles dies when its forward graph is in the folder and nobody knows of
    it; then all do, and start again.
    """
    job(tmp_path, "killed at its end", dies="all")
    assert list((tmp_path / "cache" / "fxgraph").rglob("*"))
    found = job(tmp_path, "again")
    assert all(rank["tensor_parallel"]["right"] for rank in found)
    assert lowered(found, "tensor_parallel") == 1  # the backward one
