"""The compiler of a run of tests: the same text by the same command is built once, all else as
g++ does.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

WRAPPER = Path(__file__).parents[2] / "tools" / "ci" / "g++"
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


@pytest.fixture
def build(tmp_path):
    def run(text, name, *flags, built="built"):
        source, out = tmp_path / f"{name}.cpp", tmp_path / f"{name}.so"
        source.write_text(text)
        kept = {"DYNAMO_DIST_BUILT": str(tmp_path / built)} if built else {}
        command = [WRAPPER, str(source), "-shared", "-fPIC", *flags, "-o", str(out)]
        variables = {k: v for k, v in os.environ.items() if k != "DYNAMO_DIST_BUILT"}
        done = subprocess.run(
            command, env={**variables, **kept}, capture_output=True, text=True, check=False
        )
        return done.returncode, out, sorted((tmp_path / "built").glob("*"))

    return run


def test_equal_text_and_command_are_built_once(build):
    text = 'extern "C" int one() { return 1; }'
    code, first, kept = build(text, "a")
    assert code == 0 and first.exists() and len(kept) == 1
    kept[0].write_bytes(b"what was built")
    code, second, kept = build(text, "b")
    assert code == 0 and second.read_bytes() == b"what was built" and len(kept) == 1


def test_another_text_or_flag_is_built(build):
    build('extern "C" int one() { return 1; }', "a")
    assert len(build('extern "C" int one() { return 2; }', "b")[2]) == 2
    assert len(build('extern "C" int one() { return 2; }', "c", "-O2")[2]) == 3


def test_an_error_stays_one_and_is_not_kept(build):
    code, out, kept = build("int one( {", "a")
    assert code != 0 and not out.exists() and kept == []
    assert build("int one( {", "b")[0] != 0


def test_without_a_folder_it_is_the_compiler(build):
    code, out, kept = build('extern "C" int one() { return 1; }', "a", built="")
    assert code == 0 and out.exists() and kept == []
    said = subprocess.run([WRAPPER, "--version"], capture_output=True, text=True, check=True)
    assert "g++" in said.stdout.lower() or "gcc" in said.stdout.lower()
