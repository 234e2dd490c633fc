"""The worked changes of docs/extending: each applies to these sources, and what it adds passes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCHES = sorted((ROOT / "docs" / "extending").glob("*.patch"))
NAMES = [path.stem for path in PATCHES]
NIGHTLY = ("cause", "figure")


def said(*command, cwd, **env):
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def written_tests(patch):
    """Test files that a patch writes or changes."""
    return re.findall(r"^\+\+\+ b/(test/\S+\.py)$", patch.read_text(), flags=re.MULTILINE)


def test_the_page_names_each():
    page = (ROOT / "docs" / "extending" / "README.md").read_text()
    assert NAMES == ["cause", "figure", "pass", "strategy", "tracker"]
    assert all(f"({name}.patch)" in page for name in NAMES)


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_it_applies_and_has_a_test(patch):
    assert written_tests(patch)
    said("git", "apply", "--check", str(patch), cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "patch",
    # What two of them add goes through the same places as what the others do.
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.sweep] * (path.stem in NIGHTLY))
        for path in PATCHES
    ],
)
def test_what_it_adds_passes(patch, tmp_path):
    for name in ("dynamo_dist", "inductor_passes", "test", "tools", "docs"):
        leave = shutil.ignore_patterns("__pycache__", "corpus", "results")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=leave)
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    said("git", "apply", str(patch), cwd=tmp_path)
    ran = said(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *written_tests(patch)),
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert re.search(r"^\d+ passed", ran, flags=re.MULTILINE), ran
    if "docs/reference/graph-breaks.md" in patch.read_text():
        said(
            sys.executable,
            "tools/docs/reference.py",
            "--check",
            cwd=tmp_path,
            PYTHONPATH=str(tmp_path),
        )
