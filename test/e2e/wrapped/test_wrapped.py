"""Modules of FSDP2 and DDP as they are, on real ranks: trained in one graph as in eager mode, or refused with a reason."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
FOUND = [
    (int(ranks), name)
    for file in sorted(FOLDER.glob("*_programs.py"))
    for ranks, name in re.findall(r"^@program\((\d)\)\ndef (\w+)\(", file.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def results(cases_on_ranks, tmp_path_factory):
    """By number of ranks, what each rank says of each program."""
    worker = FOLDER / "worker.py"
    return {
        ranks: cases_on_ranks(
            worker, ranks, [], tmp_path_factory.mktemp(f"ranks{ranks}"), timeout=600
        )
        for ranks in (2, 4)
    }


@pytest.mark.parametrize(("ranks", "name"), FOUND)
def test_program(results, ranks, name):
    assert [each[name] for each in results[ranks]] == ["ok"] * ranks


def test_there_are_many():
    assert len(FOUND) > 60 and len(dict(map(reversed, FOUND))) == len(FOUND)


def test_memory():
    """Parameters that are freed behind forward are so in a graph: with default options its peak is 1.05 times eager mode's, at most."""
    done = subprocess.run(
        [sys.executable, FOLDER / "memory_worker.py"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
