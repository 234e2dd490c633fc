"""The source distribution and the wheel: complete, and good for an environment that has never seen
the checkout.
"""

import configparser
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, pathlib, sys
import torch
import dynamo_dist, inductor_passes
from dynamo_dist.testing import fake_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

for package in (dynamo_dist, inductor_passes):
    assert pathlib.Path(package.__file__).is_relative_to(sys.prefix), package.__file__
with fake_mesh(2) as mesh:
    weight = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)], src_data_rank=None)

    @torch.compile(backend="dynamo_dist", fullgraph=True, options={"report": sys.argv[1]})
    def step(x):
        return x @ weight.redistribute(placements=[Replicate()]).to_local()

    with torch.no_grad():
        step(torch.ones(2, 8))
print(sorted(path.name for path in pathlib.Path(sys.argv[1]).iterdir()))
"""


def run(*command, cwd):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel that is built from the source distribution, which so holds all that it needs."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("wheel")
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    for name in tracked:  # neither caches nor what an earlier build left
        if (ROOT / name).is_file():
            (folder / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "tree" / name)
    run(sys.executable, "-m", "build", "--no-isolation", "-o", folder, cwd=folder / "tree")
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.slow
def test_wheel_holds_each_file_of_the_packages(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "dynamo_dist", "inductor_passes", cwd=ROOT).split()
    assert inside == {name for name in tracked if (ROOT / name).is_file()}
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    parsed = configparser.ConfigParser()
    parsed.read_string(archive.read(entry_points).decode())
    assert set(parsed.sections()) >= {"torch_dynamo_backends", "torch.backends"}


@pytest.mark.slow
def test_wheel_runs_outside_the_checkout(wheel, tmp_path):
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    # torch and what else is required, without installing them again. A path file in a folder that
    # a path file names is not read, so that an editable install there stays unseen.
    (site / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    shown = run(python, "-I", "-c", PROGRAM, tmp_path / "out", cwd=tmp_path)
    assert shown.strip() == "['report.rank0.html', 'report.rank0.json', 'trace.rank0.json']"
    assert "dynamo_dist" in run(python, "-I", "-m", "dynamo_dist", "--help", cwd=tmp_path)
