"""Processes that share one cache folder never serve the decisions of one set of strategies to
another.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
CHILD = Path(__file__).with_name("strategy_cache_child.py")
ROOT = CHILD.parents[2]
SHARDED, WHOLE = "(Shard(dim=0),)", "(Replicate(),)"
PLACEMENTS = {
    "upstream": SHARDED,
    "enabled": SHARDED,
    "registered": WHOLE,
    "registered again": SHARDED,
    "disabled": SHARDED,
}


def run(states, cache, root=ROOT, **environment):
    env = {
        **os.environ,
        "PYTHONPATH": str(root),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    command = [sys.executable, str(CHILD), ",".join(states)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(cache):
    return run(PLACEMENTS, cache)


def placements(found):
    return {name: (each["eager"], each["compiled"]) for name, each in found.items()}


def hits(found, cache):
    return [each[cache] for each in found.values()]


EXPECTED = {name: (each, each) for name, each in PLACEMENTS.items()}


def test_each_set_of_strategies_has_an_entry_of_its_own(first):
    assert placements(first) == EXPECTED
    # Disabled is upstream, to the caches too.
    assert hits(first, "aot") == [0, 0, 0, 0, 1]


def test_another_process_finds_them(first, cache):
    found = run(PLACEMENTS, cache)
    assert placements(found) == EXPECTED
    assert hits(found, "aot") == [1, 1, 1, 1, 1]


def test_inductors_own_cache_serves_none_of_another(tmp_path):
    found = run(PLACEMENTS, tmp_path, TORCHINDUCTOR_AUTOGRAD_CACHE="0")
    assert placements(found) == EXPECTED
    assert hits(found, "aot") == [0, 0, 0, 0, 0]
    assert hits(found, "inductor") == [0, 0, 0, 0, 1]


def test_an_upgrade_is_another_set_of_strategies(first, cache, tmp_path):
    for package in ("dynamo_dist", "inductor_passes"):
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    rules = tmp_path / "dynamo_dist" / "sharding" / "rules" / "reduction.py"
    before = '"aten.logsumexp.default": beside_the_reduction'
    assert before in rules.read_text()
    rules.write_text(
        rules.read_text().replace(
            before, before.replace("beside_the_reduction", "on_whole_tensors")
        )
    )
    found = run(["upstream", "enabled"], cache, tmp_path)
    assert placements(found) == {"upstream": (SHARDED, SHARDED), "enabled": (WHOLE, WHOLE)}
    assert hits(found, "aot") == [1, 0]
