"""Mutants of every format: a sample. ``python tools/fuzz_files.py`` runs many."""

import gzip
import subprocess
import sys

import fuzz_files
import pytest
from fuzzing.file_examples import Example, examples

FORMATS = sorted(examples())
BOMB = gzip.compress(b"0" * 2**26, 1) * 64


@pytest.mark.parametrize("name", FORMATS)
def test_a_mutant_gives_a_result_or_one_line(name):
    assert [(f.seed, f.why, f.detail) for f in fuzz_files.run(name, 25, 0)] == []


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file_is_read(name, tmp_path):
    path = tmp_path / "file.json"
    path.write_text(examples()[name].text)
    assert examples()[name].read(path) == (0, "")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "record"])
def test_a_small_file_of_four_gigabytes(name, tmp_path):
    example, path = examples()[name], tmp_path / "file.json"
    assert fuzz_files.judge(name, "bomb", BOMB, example, path) is None
    status, said = example.read(path)
    assert status == 2 and "MiB" in said


def planted(read):
    return Example("{}", read)


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (lambda path: (1, "error: x\n"), "exit status 1"),
        (lambda path: (2, "error: x\ny\n"), "not one line"),
        (lambda path: {}["a"], "KeyError: 'a'"),
        (lambda path: sys.exit(0), "SystemExit: 0"),
    ],
)
def test_planted_faults_are_found(read, why, tmp_path):
    assert fuzz_files.judge("x", "1", b"{}", planted(read), tmp_path / "f").why == why


def test_what_never_ends_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(fuzz_files, "MOST_S", 0.02)

    def read(path):
        while True:
            pass

    assert fuzz_files.judge("x", "1", b"{}", planted(read), tmp_path / "f").why == "never ended"


def test_the_command_runs():
    command = [sys.executable, fuzz_files.__file__, "--mutants", "2", "--only", "log", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith('{"log": {"mutants": 2, "failures": []')
