"""The example package as an outsider has it: installed with pip, found by entry point."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from inductor_passes.plugins import OFF

EXAMPLE = Path(__file__).parents[2] / "docs" / "example_plugin"
CHILD = Path(__file__).with_name("plugin_child.py")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "site"
    shutil.copytree(EXAMPLE, source)
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-q"]
    subprocess.run([*command, "--no-index", "--target", target, source], check=True, timeout=300)
    return target


def run(site, *arguments, **more):
    path = os.pathsep.join(map(str, filter(None, (site, os.environ.get("PYTHONPATH")))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}
    done = subprocess.run(
        [sys.executable, CHILD, *arguments], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found(installed, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return run(installed, "compile", TORCHINDUCTOR_CACHE_DIR=str(cache))


def edited(installed, tmp_path, file, old, new):
    site = tmp_path / "site"
    shutil.copytree(installed, site)
    path = site / "example_plugin" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return site


def failures(result):
    return {p["what"]: p["why"] for p in result["degraded"] if p["what"].startswith("plugin")}


def test_pass_strategy_hook_and_topology_are_in_force(found):
    assert failures(found) == {}
    names = found["passes"]
    assert names.index("count_waits") == names.index("schedule") - 1
    (graph,) = found["named"]
    assert graph["topology"] == "example-cluster"
    # The function's collective is in the graph; the operator ran on shards, so it needed none.
    assert graph["launches"] == ["all_reduce"]
    assert graph["passes"]["count_waits"] == {"waits_behind_launch": 1}


def test_its_pass_is_switched_off_by_name(found):
    (graph,) = found["off"]
    assert "count_waits" not in graph["passes"] and "schedule" in graph["passes"]


def test_all_of_it_is_switched_off_by_name(found, installed):
    off = run(installed, **{OFF: "other, example"})
    assert "count_waits" not in off["passes"] and not off["strategy"]
    assert off["uuid"] != found["uuid"] and failures(off) == {}


def test_a_change_of_its_helper_is_a_change_of_the_cache_key(found, installed, tmp_path):
    again = run(installed)
    assert (again["uuid"], again["tag"]) == (found["uuid"], found["tag"])
    site = edited(installed, tmp_path, "counting.py", "How many waits", "The number of waits that")
    other = run(site)
    assert other["uuid"] != found["uuid"]
    assert other["tag"] != found["tag"]  # of a strategy in the same package, too


def test_a_plugin_that_fails_half_way_leaves_nothing_behind(installed, tmp_path):
    broken = "raise KeyError('no such cluster')"
    site = edited(
        installed,
        tmp_path,
        "passes.py",
        "    inductor_passes.register_topology(",
        f"    {broken}\n    print(",
    )
    result = run(site)
    assert "count_waits" not in result["passes"]
    assert failures(result) == {"plugin example": "KeyError: 'no such cluster'"}
    assert result["strategy"]  # its other entry point is fine


def test_a_plugin_that_cannot_be_imported(installed, tmp_path):
    site = edited(
        installed, tmp_path, "tracing.py", "import dynamo_dist.trackers", "import no_such_module"
    )
    result = run(site)
    assert failures(result) == {
        "plugin example": "ModuleNotFoundError: No module named 'no_such_module'"
    }
    assert "count_waits" in result["passes"] and not result["strategy"]
