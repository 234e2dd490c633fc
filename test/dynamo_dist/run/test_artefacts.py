"""Files beside Inductor's cache: half of one is none; a trial of a vector unit that succeeded is not made again."""

import os
import pickle
import shutil
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import codecache
from torch._inductor.cpu_vec_isa import VecAMX, VecAVX2, VecAVX512, VecISA
from torch._inductor.output_code import CompiledFxGraph

from dynamo_dist.torch_compat.inductor import artefacts, vector_units


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def library(tmp_path):
    """Some shared library of this host."""
    lib = Path(torch.__file__).parent / "lib" / "libshm.so"
    return Path(shutil.copy(lib, tmp_path / "some.so"))


def cut(path, size):
    os.truncate(path, size)
    return str(path)


@pytest.mark.skipif(
    sysconfig.get_platform() != "linux-x86_64", reason="reads headers of ELF libraries for x86-64"
)
def test_a_library_is_whole_up_to_its_table_of_sections(library):
    assert artefacts.is_whole(str(library))
    for size in (4096, 63, 0):
        assert not artefacts.is_whole(cut(library, size))
    assert not artefacts.is_whole(f"{library}.none")


def test_a_library_that_begins_as_no_library_is_not_whole(library):
    library.write_bytes(bytes(library.stat().st_size))
    assert not artefacts.is_whole(str(library))


class Builder:
    """Stands for Inductor's: copies a library to its target, or the first part of it."""

    def __init__(self, source, target, fails=False):
        self.source, self.fails, self.built = source, fails, []
        self._target_file = str(target)
        self._output = f"-o {target}"

    def get_target_file_path(self):
        return self._target_file

    def build(self):
        self.built.append(self._output)
        out = self._output.removeprefix("-o ")
        shutil.copy(self.source, out)
        if self.fails:
            cut(out, 100)
            raise OSError("No space left on device")


def test_half_a_library_is_built_again_and_a_whole_one_is_not(library, folder):
    builder = Builder(library, folder / "target.so")
    for times in (1, 1, 2):
        if times == 2:
            cut(folder / "target.so", 100)
        artefacts.build(str(folder / "lock"), [builder])
        assert (folder / "target.so").read_bytes() == library.read_bytes()
        assert len(builder.built) == times
    assert str(folder / "target.so") not in {each.removeprefix("-o ") for each in builder.built}


def test_a_build_that_fails_leaves_nothing(library, folder):
    before = set(os.listdir(folder))
    with pytest.raises(OSError, match="No space"):
        artefacts.build(str(folder / "lock"), [Builder(library, folder / "target.so", fails=True)])
    assert set(os.listdir(folder)) - before <= {"lock"}


def test_inductors_other_processes_build_so_too(enabled):
    assert pickle.loads(pickle.dumps(codecache._worker_compile_cpp)) is artefacts.build


@pytest.mark.parametrize("left", [b"", b"x = 1", b"x = 1" + bytes(8)])
def test_half_a_source_is_written_again(enabled, left):
    path = Path(codecache.write("x = 1\ny = 2\n", "py")[1])
    path.write_bytes(left)
    codecache.write("x = 1\ny = 2\n", "py")
    assert path.read_text() == "x = 1\ny = 2\n"


def test_what_somebody_has_edited_stays(enabled):
    path = Path(codecache.write("x = 1\ny = 2\n", "py")[1])
    path.write_text("x = 3\n")
    codecache.write("x = 1\ny = 2\n", "py")
    assert path.read_text() == "x = 3\n"


def test_so_is_the_module_of_a_graph_from_the_cache(enabled):
    graph = SimpleNamespace(cache_key="key", source_code="def call(args):\n    return args\n")
    path = Path(CompiledFxGraph.write_to_disk(graph))
    path.write_text("def call(args):\n")
    assert CompiledFxGraph.write_to_disk(graph) == str(path)
    assert path.read_text() == graph.source_code


@pytest.fixture
def trials(monkeypatch):
    """Units and codes that were tried, by a stock that says what it is asked to."""
    made = []

    def check_build(self, code):
        made.append((str(self), code))
        return code != "bad"

    monkeypatch.setattr(VecISA, "check_build", check_build)
    (change,) = vector_units.probed_once_a_host()
    change.apply()
    yield made
    change.undo()


def test_what_has_succeeded_is_not_tried_again(trials):
    assert all(VecAVX2().check_build(code) for code in ("good", "good", "other"))
    assert trials == [("avx2", "good"), ("avx2", "other")]


def test_what_has_failed_is(trials):
    assert not any(VecAVX2().check_build("bad") for _ in range(2))
    assert len(trials) == 2


def test_nor_is_it_taken_from_another_host(trials, monkeypatch):
    assert VecAVX2().check_build("good")
    monkeypatch.setattr(vector_units, "_host", lambda: ("another",))
    assert VecAVX2().check_build("good")
    assert len(trials) == 2


def test_half_a_library_of_a_killed_trial_is_dropped(trials):
    fingerprint = vector_units._fingerprint(VecAVX2())
    left = Path(codecache.write("good", "cpp", extra=fingerprint)[1]).with_suffix(".so")
    left.write_bytes(b"\x7fELF")
    assert VecAVX2().check_build("good") and not left.exists()


def test_a_folder_that_cannot_be_written_costs_a_process_the_trial(trials, folder):
    (folder / "dynamo_dist").write_text("a file where a folder should be")
    assert all(VecAVX2().check_build("good") for _ in range(2))
    assert len(trials) == 1 and not (folder / "dynamo_dist").is_dir()


@pytest.mark.parametrize("code", ["good", "bad"])
def test_a_unit_within_another_that_has_built_the_code_is_not_tried(trials, code):
    found = [unit().check_build(code) for unit in (VecAMX, VecAVX512, VecAVX2)]
    tried = [unit for unit, _ in trials]
    if code == "bad":
        assert not any(found) and len(tried) == 3
    else:
        assert all(found) and tried == [str(VecAMX()), "avx2"]


def test_a_wider_unit_is_tried_after_its_part(trials):
    assert all(unit().check_build("good") for unit in (VecAVX512, VecAMX))
    assert len(trials) == 2
