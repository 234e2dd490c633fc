"""Modules of FSDP2 and DDP as they are, on real ranks: trained in one graph as in eager mode, or
refused with a reason.
"""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent
PROGRAM = re.compile(r"^@program\((\d)(, sweep=True)?\)\ndef (\w+)\(", re.MULTILINE)
FOUND = [
    pytest.param(int(ranks), name, marks=[pytest.mark.sweep] if sweep else [])
    for file in sorted(FOLDER.glob("*_programs.py"))
    for ranks, sweep, name in PROGRAM.findall(file.read_text())
]


@pytest.fixture(scope="module")
def results(asked, cases_on_ranks, tmp_path_factory):
    """By number of ranks, what each rank says of each program that was asked for."""
    worker = FOLDER / "worker.py"
    return {
        ranks: cases_on_ranks(
            worker,
            ranks,
            [each["name"] for each in asked if each["ranks"] == ranks],
            tmp_path_factory.mktemp(f"ranks{ranks}"),
            timeout=600,
        )
        for ranks in {each["ranks"] for each in asked}
    }


@pytest.mark.parametrize(("ranks", "name"), FOUND)
def test_program(results, ranks, name):
    assert [each[name] for each in results[ranks]] == ["ok"] * ranks


def test_there_are_many():
    assert len(FOUND) > 60 and len({each.values[1] for each in FOUND}) == len(FOUND)
