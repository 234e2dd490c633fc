"""Each feature is a folder: without it all else compiles, and the commands run."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FEATURES = {
    "inductor_passes/split": "split",
    "inductor_passes/fused": None,
    "dynamo_dist/planning": "plan",
}

# In an editable install a finder of setuptools would bring the missing folder from the checkout.
WITHOUT_FINDER = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
"""

# A tensor-parallel training step with the backend, and every command.
PROGRAM = """
import contextlib
import importlib.util
import json
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamo_dist
import inductor_passes
from dynamo_dist import __main__ as of_dynamo_dist
from dynamo_dist.testing import fake_mesh
from inductor_passes import __main__ as of_inductor_passes
from inductor_passes.errors import OptionError
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.report.recorder import records_of_block

removed, options = json.loads(sys.argv[1])
for name in removed:
    assert importlib.util.find_spec(name) is None, name

with fake_mesh(4) as mesh, graph_passes_only(), records_of_block() as records:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    compiled = torch.compile(model, backend="dynamo_dist", fullgraph=True)
    compiled(torch.ones(8, 16, requires_grad=True)).sum().backward()
assert {each.phase for each in records} == {"forward", "backward"}
assert all(each.collectives and each.schedule for each in records)

for option in options:
    with pytest.raises(OptionError, match=f"Unknown option '{option}'"):
        inductor_passes.options({option: "off"})

assert of_dynamo_dist.main(["doctor"]) == 0
for module in (of_dynamo_dist, of_inductor_passes):
    subcommands = module.parser()._subparsers._group_actions[0].choices
    for command in ([], *([name] for name in subcommands)):
        with pytest.raises(SystemExit, match="0"):
            module.main([*command, "--help"])
print("all is well")
"""

# Tests of the core's own subpackages, which must pass where no feature is.
CORE_TESTS = (
    "test/inductor_passes/test_extensions.py",
    "test/inductor_passes/test_plugins.py",
    "test/inductor_passes/test_pass_options.py",
    "test/inductor_passes/rewrite/test_rewrites.py",
)


@pytest.fixture
def checkout(tmp_path):
    """Return a function that copies the packages without some folders, and runs Python there."""

    def without(folders, *command):
        leave = shutil.ignore_patterns("__pycache__", "corpus", "results")
        for name in ("dynamo_dist", "inductor_passes", "test", "tools"):
            shutil.copytree(ROOT / name, tmp_path / name, ignore=leave)
        shutil.copy(ROOT / "setup.cfg", tmp_path)
        (tmp_path / "sitecustomize.py").write_text(WITHOUT_FINDER)
        for folder in folders:
            shutil.rmtree(tmp_path / folder)
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return without


@pytest.mark.slow
@pytest.mark.parametrize("folder", FEATURES)
def test_a_program_and_the_commands_run_without_one(folder, checkout):
    options = [FEATURES[folder]] if FEATURES[folder] else []
    removed = json.dumps([[folder.replace("/", ".")], options])
    assert "all is well" in checkout([folder], "-c", PROGRAM, removed)


@pytest.mark.slow
def test_tests_of_the_core_pass_without_all(checkout):
    checkout(FEATURES, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CORE_TESTS)
