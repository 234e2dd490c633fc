"""Modules of FSDP2 and DDP as they are, on real ranks: trained in one graph as in eager mode, or refused with a reason."""

import json
import re
import subprocess
import sys
from pathlib import Path

import preloaded
import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
FOUND = [
    (int(ranks), name)
    for file in sorted(FOLDER.glob("*_programs.py"))
    for ranks, name in re.findall(r"^@program\((\d)\)\ndef (\w+)\(", file.read_text(), re.MULTILINE)
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By number of ranks, what each rank says of each program."""
    found = {}
    for ranks in (2, 4):
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        variables = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        _, said = preloaded.run_ranks(
            FOLDER / "worker.py", ranks, [str(folder)], variables, folder=folder, timeout_s=600
        )
        files = [folder / f"{rank}.json" for rank in range(ranks)]
        records = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        found[ranks] = records, said[-3000:]
    return found


@pytest.mark.parametrize(("ranks", "name"), FOUND)
def test_program(results, ranks, name):
    records, said = results[ranks]
    assert [each.get(name, said) for each in records] == ["ok"] * ranks


def test_there_are_many():
    assert len(FOUND) > 60 and len(dict(map(reversed, FOUND))) == len(FOUND)


def test_memory():
    """Parameters that are freed behind forward are so in a graph: with default options its peak is eager mode's, at most."""
    done = subprocess.run(
        [sys.executable, FOLDER / "memory_worker.py"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
