"""Inductor's and AOTAutograd's caches keep working, and no state is served another state's
result.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

pytestmark = pytest.mark.slow
CHILD = Path(__file__).with_name("cache_child.py")


def run(state, cache, new=True):
    """What a process says; ``new``: of a new Python, which hashes otherwise than others."""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    if new:
        command = [sys.executable, str(CHILD), state]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    else:
        done = forked.run_script(CHILD, state, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_three_states_share_one_cache_folder(tmp_path):
    first = {state: run(state, tmp_path) for state in ("upstream", "enabled", "disabled")}
    again = {state: run(state, tmp_path) for state in ("enabled", "disabled")}
    assert (first["upstream"]["hits"], first["upstream"]["misses"]) == (0, 1)
    assert (first["enabled"]["hits"], first["enabled"]["misses"]) == (0, 1)
    # Disabled is upstream again, to the cache too.
    assert (first["disabled"]["hits"], first["disabled"]["misses"]) == (1, 0)
    for state, result in again.items():
        assert (result["hits"], result["misses"]) == (1, 0), state
    # The record of what the passes did comes back from a warm cache, where no pass ran.
    assert first["enabled"]["records"] == again["enabled"]["records"] == [["inference", 1, True]]
    assert first["upstream"]["records"] == again["disabled"]["records"] == []
    assert len({r["checksum"] for r in (*first.values(), *again.values())}) == 1


@pytest.mark.sweep  # the sharded layers below train from the same caches
def test_cached_training_step_accumulates_gradients(tmp_path):
    first, again = (run("training", tmp_path) for _ in range(2))
    assert (first["hits"], again["hits"]) == (0, 1)
    assert first["added_at_once"] == again["added_at_once"] == 1
    assert first["checksum"] == again["checksum"]


def test_fully_sharded_layers_are_found_again_by_another_process(tmp_path):
    first, again = (run("sharded", tmp_path) for _ in range(2))
    assert (first["hits"], first["misses"]) == (0, 1)
    assert (again["hits"], again["misses"]) == (1, 0)
    assert first["checksum"] == again["checksum"]
