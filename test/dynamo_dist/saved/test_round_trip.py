"""What is saved comes back whole; what is not whole, not ours alone or of another process is refused, and nothing of it is put anywhere."""

import errno
import json
import os
import shutil
import stat

import pytest
import torch._functorch.config
import torch._inductor.config

import dynamo_dist
from dynamo_dist.errors import ArtefactError
from dynamo_dist.saved import compiles, fingerprint, owned
from dynamo_dist.torch_compat.inductor import saved
from inductor_passes.pass_options import PassOptions
from inductor_passes.reporting import recorder


@pytest.fixture
def folder(tmp_path, process):
    """A folder that another process has saved."""
    dynamo_dist.save(tmp_path / "saved")
    process()
    return tmp_path / "saved"


def one(folder, suffix):
    [found] = folder.glob(f"*.{suffix}")
    return found


def edited(folder, **fields):
    manifest = one(folder, "json")
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), **fields}))


def cached(process):
    return sorted(p.read_bytes() for p in process.cache.rglob("*") if p.is_file())


def refused(folder, process, words):
    with pytest.raises(ArtefactError) as error:
        dynamo_dist.load(folder)
    assert words in str(error.value)
    assert cached(process) == [] and not compiles.has_loaded()


def test_all_entries_come_back(folder, process):
    found = dynamo_dist.load(folder)
    assert cached(process) == [b"first", b"library", b"second"]
    assert (process.cache / "ab" / "cab.main.so").read_bytes() == b"library"
    assert (found.graphs, found.entries, found.bytes) == (0, 3, 18)
    assert str(found).startswith("0 compiled graphs, 3 entries")


def test_it_is_this_users_alone(folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}


def test_saved_again_it_takes_the_place_of_the_first(folder, process, monkeypatch):
    compiles._noted.append({"options": {}, "meshes": []})
    monkeypatch.setattr(saved, "recorded", lambda: [saved.Entry("aot_autograd", "b", b"other")])
    dynamo_dist.save(folder)
    assert one(folder, "bin").read_bytes() == b"other"
    dynamo_dist.load(folder)
    assert cached(process) == [b"other"]


def test_nothing_was_compiled(tmp_path, process, monkeypatch):
    process()
    with pytest.raises(ArtefactError, match="this process has compiled nothing"):
        dynamo_dist.save(tmp_path / "saved")
    monkeypatch.setattr(saved, "recorded", list)
    compiles._noted.append({})
    with pytest.raises(ArtefactError, match="torch's caches have no graph of this process"):
        dynamo_dist.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_one_of_several_ranks_needs_its_group(tmp_path, process, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    for call in (dynamo_dist.save, dynamo_dist.load):
        with pytest.raises(ArtefactError, match="one of 4 ranks, and has no process group yet"):
            call(tmp_path)


@pytest.mark.parametrize("suffix", ["bin", "json"])
def test_a_truncated_file(folder, process, suffix):
    file = one(folder, suffix)
    file.write_bytes(file.read_bytes()[:-3])
    refused(folder, process, "15 bytes, and 18 were saved" if suffix == "bin" else "is not JSON")


def test_a_file_that_holds_something_else(folder, process):
    file = one(folder, "bin")
    file.write_bytes(file.read_bytes()[::-1])
    refused(folder, process, "does not hold what was saved. Its digest is another one.")


def test_files_that_are_not_there(folder, process, tmp_path):
    refused(tmp_path / "nowhere", process, "There is no folder")
    refused(one(folder, "json"), process, "Not a directory")
    one(folder, "bin").unlink()
    refused(folder, process, "is not there. The folder was not copied whole.")
    one(folder, "json").unlink()
    refused(folder, process, "holds no artefacts.")


def test_a_newer_and_a_foreign_manifest(folder, process):
    edited(folder, format=2)
    refused(folder, process, "has format 2, and this version reads 1")
    edited(folder, **{"format": 1, "is": "a recipe"})
    refused(folder, process, "field 'is' is \"a recipe\"")


def test_a_field_of_another_type(folder, process):
    edited(folder, entries=[{"kind": "precompile", "name": "x", "bytes": 18}])
    refused(folder, process, "entries[0].kind")


def test_names_that_leave_their_folder(folder, process):
    edited(folder, entries=[{"kind": "file", "name": "../evil.so", "bytes": 18}])
    refused(folder, process, "lies outside the cache folder")
    edited(folder, file="../other.bin")
    refused(folder, process, "lies outside the folder")


@pytest.mark.parametrize("name", ["", "bin", "json"])
@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_what_others_can_write(folder, process, name, mode):
    (one(folder, name) if name else folder).chmod(mode)
    refused(folder, process, f"can be written by others (mode {mode:o}). Artefacts are pickles")
    if not name:
        compiles._noted.append({})
        with pytest.raises(ArtefactError, match="can be written by others"):
            dynamo_dist.save(folder)


def test_what_another_user_owns(folder, process, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda user=os.geteuid(): user + 1)
    refused(folder, process, "belongs to user")


def test_a_link_in_the_place_of_a_file(folder, process, tmp_path):
    file = one(folder, "bin")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    refused(folder, process, "Cannot read")


def test_a_pipe_in_the_place_of_a_file(folder, process):
    file = one(folder, "bin")
    file.unlink()
    os.mkfifo(file)
    refused(folder, process, "is no file")


@pytest.mark.parametrize("which", ["bin", "json"])
def test_a_full_disk_leaves_the_earlier_save(folder, process, monkeypatch, which):
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    whole = owned.write_whole

    def full(path, content):
        if path.endswith(which):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(path, content)

    monkeypatch.setattr(owned, "write_whole", full)
    monkeypatch.setattr(saved, "recorded", lambda: [saved.Entry("aot_autograd", "b", b"other")])
    compiles._noted.append({})
    with pytest.raises(ArtefactError, match="No space left on device"):
        dynamo_dist.save(folder)
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_what_a_killed_save_left_is_removed(folder, process):
    left = [folder / ".unfinished.rank-0-of-1.json.x", folder / "rank-0-of-1.0123.bin"]
    others = [folder / ".unfinished.rank-0-of-10.json.x", folder / "rank-0-of-10.0123.bin"]
    for each in (*left, *others):
        each.write_text("")
    compiles._noted.append({})
    dynamo_dist.save(folder)
    assert [each.exists() for each in left] == [False] * 2
    assert [each.exists() for each in others] == [True] * 2


def test_half_a_write_leaves_no_remains(tmp_path, monkeypatch):
    monkeypatch.setattr(
        os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    )
    with pytest.raises(OSError, match="full"):
        owned.write_whole(str(tmp_path / "file"), b"content")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(folder, process):
    shutil.rmtree(process.cache, ignore_errors=True)
    process.cache.write_text("a file")
    with pytest.raises(ArtefactError, match="into torch's caches"):
        dynamo_dist.load(folder)
    assert not compiles.has_loaded()


def test_what_differs_is_named(folder, process, monkeypatch):
    facts = fingerprint.of_process()
    now = {**facts, "torch": "2.99", "job": {**facts["job"], "backend": "nccl"}}
    monkeypatch.setattr(fingerprint, "of_process", lambda: now)
    refused(folder, process, f"job.backend: none -> nccl; torch: {facts['torch']} -> 2.99.")


def test_another_number_of_ranks_and_a_rank_that_saved_nothing(folder, process, monkeypatch):
    facts = fingerprint.of_process()
    job = {**facts["job"], "world_size": 2}
    monkeypatch.setattr(fingerprint, "of_process", lambda: {**facts, "job": job})
    refused(folder, process, "do not fit: job.world_size: 1 -> 2.")
    job |= {"world_size": 1, "rank": 3}
    refused(folder, process, "holds no artefacts of rank 3, but of [0]")


def note(options=None, inductor=None, inputs=()):
    from inductor_passes.pass_options import split

    own, _ = split(options or {})
    with compiles.noting(own, inductor or {}, inputs):
        pass


def test_a_compile_with_other_options_is_an_error(folder):
    note({"schedule": {"effort": "high"}})  # nothing is loaded yet
    dynamo_dist.load(folder)
    note()
    note({"report": "elsewhere", "compile": "shared"})  # which change no graph
    with pytest.raises(ArtefactError, match=r"options\.schedule\.effort: default -> high\."):
        note({"schedule": {"effort": "high"}})
    with pytest.raises(ArtefactError, match=r"options\.inductor\.max_autotune: none -> True\."):
        note(inductor={"max_autotune": True})
    with pytest.raises(ArtefactError, match=r"options\.schedule: .*-> off\."):
        note({"schedule": "off"})


def test_a_compile_on_another_mesh_is_an_error(mesh, folder):
    dynamo_dist.load(folder)
    with pytest.raises(ArtefactError, match=r"meshes: .*cpu 2 .*-> .*cpu 2 x 4 \('dp', 'tp'\)"):
        note(inputs=[mesh])


def test_a_graph_that_was_not_saved_is_said(folder, caplog):
    dynamo_dist.load(folder)
    caplog.clear()
    with compiles.noting(PassOptions(), {}, ()):
        pass
    assert caplog.messages == []
    counts = saved.torch._dynamo.utils.counters["aot_autograd"]
    with compiles.noting(PassOptions(), {}, ()):
        counts["autograd_cache_miss"] += 1
    assert f"not among the artefacts of {folder}: it was compiled" in caplog.text


def test_records_of_reports_go_along(tmp_path, process):
    recorder.keep("records", "abc", {"a": 1})
    dynamo_dist.save(tmp_path / "saved")
    process()
    kept = process.cache / "inductor_passes" / "records" / "abc.json"
    kept.unlink()
    dynamo_dist.load(tmp_path / "saved")
    assert json.loads(kept.read_text()) == {"a": 1}
    assert recorder._loaded["inductor_passes/records/abc.json"] == str(tmp_path / "saved")


def test_a_strategy_that_is_not_registered_is_named(folder, process, monkeypatch):
    monkeypatch.setattr(fingerprint.registration, "digests", lambda: {"aten.mm.default": "ab"})
    refused(folder, process, "strategies.aten.mm.default: none -> ab.")


@pytest.mark.parametrize(
    ("config", "name", "value"),
    [
        (torch._inductor.config, "force_disable_caches", True),
        (torch._inductor.config, "fx_graph_cache", False),
        (torch._functorch.config, "enable_autograd_cache", False),
    ],
)
def test_caches_that_are_off(folder, process, monkeypatch, config, name, value):
    with config.patch({name: value}):
        refused(folder, process, f"torch's caches are off, by {name}.")
        monkeypatch.setattr(saved, "recorded", list)
        compiles._noted.append({})
        with pytest.raises(ArtefactError, match=f"Caches are off, by {name}"):
            dynamo_dist.save(folder)


def test_a_library_that_is_there_in_part_is_made_whole(folder, process):
    library = process.cache / "ab" / "cab.main.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    library.write_bytes(b"lib")
    dynamo_dist.load(folder)
    assert library.read_bytes() == b"library"


def test_libraries_are_those_that_this_process_has_loaded(process, tmp_path, monkeypatch):
    for name in ("ab/one.so", "ab/two.so", "ab/three.cpp", "dynamo_dist/vector_units/unit"):
        file = process.cache / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    lines = (
        f"7f00-7f01 r-xp 00000000 08:01 {number} {' ' * 20}{path}"
        for number, path in enumerate(
            (
                process.cache / "ab/one.so",
                process.cache / "ab/one.so",
                process.cache / "ab/three.cpp",
                process.cache / "ab/gone.so",
                f"{process.cache / 'ab/two.so'} (deleted)",
                "/usr/lib/libc.so",
            )
        )
    )
    maps = tmp_path / "maps"
    maps.write_text("\n".join([*lines, "7f00-7f01 rw-p 00000000 00:00 0", ""]))
    monkeypatch.setattr(saved, "_MAPS", maps)
    found = saved.files(["ab/three.cpp", "ab/no such file"])
    assert [each.name for each in found] == [
        "ab/one.so",
        "ab/three.cpp",
        "dynamo_dist/vector_units/unit",
    ]
    assert found[0].content == b"ab/one.so"
    monkeypatch.setattr(saved, "_MAPS", tmp_path / "none")
    assert [each.name for each in saved.files([])] == ["dynamo_dist/vector_units/unit"]
