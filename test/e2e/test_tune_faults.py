"""``tune`` where one rank's store fails, or the rank dies: all do the same, or the one that cannot know ends with an error."""

import os
import socket
from pathlib import Path

import forked
import pytest

WORKER = Path(__file__).with_name("tune_faults_worker.py")
ROOT = WORKER.parents[2]
# Meetings before and after the switch, the words by which ranks switch or go back, and what is read of others meanwhile.
STEPS = [
    "share/tune/0/step 0",
    "probes/of",
    "probes/word",
    "probes/all",
    "costs/of",
    "costs/word",
    "costs/all",
    "costs/all>board",
    "costs/all>/step",
    "result/of",
    "result/word",
    "result/all",
]


@pytest.mark.slow
def test_a_store_that_fails_for_a_moment_changes_nothing_and_one_that_fails_for_good_ends_its_rank(
    on_ranks,
):
    moments = ["moment:costs/word", "moment:costs/all>board", "moment:/tuned/", "moment:result"]
    on_ranks(WORKER, 2, *moments, "good:costs/word", "good:result/word", "end:/tuned/")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("way", ["moment", "good"])
@pytest.mark.parametrize("step", STEPS)
def test_a_store_that_fails_for_one_rank_at_each_step(on_ranks, step, way):
    on_ranks(WORKER, 2, f"{way}:{step}", timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["costs/of", "costs/all>/step"])
def test_a_rank_that_is_killed_while_tuning(where, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
    }
    ranks = [
        forked.Script(
            WORKER,
            f"kill:{where}",
            env={**environment, "RANK": str(rank)},
            together=tmp_path / f"{rank}.log",
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=180)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[1].returncode < 0
    assert ranks[0].returncode == 0, said[0][-3000:]
    assert "leaves the schedules as they were" in said[0]
