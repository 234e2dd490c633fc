"""The wheel holds what the packages need, and works where it alone is installed."""

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__", "demo_out")
    shutil.copytree(ROOT, source, ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*command, "-w", folder, source], check=True, timeout=300)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_data_and_entry_points(wheel):
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    for package in ("dynamo_dist", "inductor_passes"):
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert path.relative_to(ROOT).as_posix() in names
    assert not [n for n in names if n.split("/")[0] in ("test", "tools")]
    (entry_points,) = [n for n in names if n.endswith("entry_points.txt")]
    parsed = configparser.ConfigParser()
    parsed.read_string(archive.read(entry_points).decode())
    assert set(parsed.sections()) >= {"torch_dynamo_backends", "torch.backends"}


def test_the_wheel_works_alone(wheel, tmp_path):
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "-q", "--target", tmp_path]
    subprocess.run([*command, wheel], check=True, timeout=300)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    where = "import dynamo_dist, inductor_passes; print(dynamo_dist.__file__)"
    run = {"cwd": tmp_path, "env": env, "check": True, "capture_output": True, "timeout": 120}
    found = subprocess.run([sys.executable, "-c", where], text=True, **run).stdout
    assert found.startswith(str(tmp_path))
    doctor = subprocess.run([sys.executable, "-m", "dynamo_dist", "doctor", "--json"], **run)
    assert doctor.stdout
