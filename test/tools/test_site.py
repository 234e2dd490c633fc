"""The site of docs/: it builds without a warning, and a link to nowhere fails it."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NEEDED = ("sphinx", "myst_parser", "furo", "sphinxcontrib")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"the extra docs brings {', '.join(MISSING)}"),
]


def build(root):
    return subprocess.run(
        ["bash", "tools/docs/build.sh"],
        cwd=root,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def copy(tmp_path):
    """The pages and what they link to, without the packages: the site needs no torch."""
    for name in ("docs", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "CONTRIBUTING.md", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "test" / "e2e", tmp_path / "test" / "e2e")
    return tmp_path


def test_site_builds_without_a_warning(copy):
    done = build(copy)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (copy / "build" / "site" / "docs" / "index.html").exists()


def test_site_fails_on_a_link_to_no_heading(copy):
    page = copy / "docs" / "glossary.md"
    page.write_text(page.read_text() + "\n[nowhere](changelog.md#no-such-heading)\n")
    done = build(copy)
    assert done.returncode != 0
    assert "no-such-heading" in done.stderr
