"""Records on disk: whole or not at all, and never more than the folder may hold."""

import errno
import os

import pytest

from inductor_passes import files as record_folder
from inductor_passes import files as whole_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fill(folder, count, size=10):
    for i in range(count):
        path = folder / f"{i:03}.json"
        path.write_text("x" * size)
        os.utime(path, (i, i))


def test_the_oldest_go_first(tmp_path):
    fill(tmp_path, 9)
    record_folder.trim(tmp_path, most_files=3)
    assert names(tmp_path) == ["006.json", "007.json", "008.json"]
    record_folder.trim(tmp_path, most_bytes=25)
    assert names(tmp_path) == ["007.json", "008.json"]


def test_files_of_dead_processes_go_and_live_ones_stay(tmp_path):
    for name, age in (("dead", 7200), ("alive", 0)):
        path = tmp_path / f"{whole_file.TEMPORARY}{name}"
        path.write_text("{")
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    record_folder.trim(tmp_path)
    assert names(tmp_path) == [f"{whole_file.TEMPORARY}alive"]


def test_folders_in_it_are_left_alone_and_none_is_no_error(tmp_path):
    (tmp_path / "folder").mkdir()
    record_folder.trim(tmp_path, most_files=0)
    record_folder.trim(tmp_path / "none")
    assert names(tmp_path) == ["folder"]


def test_the_folder_is_trimmed_as_records_come(tmp_path, monkeypatch):
    monkeypatch.setattr(record_folder, "_stored", 0)
    monkeypatch.setattr(record_folder, "MOST_FILES", 5)
    fill(tmp_path, 9)
    for i in range(record_folder._EVERY + 1):
        record_folder.put(tmp_path, f"new{i}", "{}")
    assert len(names(tmp_path)) == 5
    assert all(name.startswith("new") for name in names(tmp_path))


@pytest.mark.parametrize("where", ["write", "replace"])
def test_a_full_disk_keeps_the_old_file_and_no_remains(tmp_path, monkeypatch, where):
    path = tmp_path / "a.json"
    whole_file.write_whole(path, "old")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "replace":
        monkeypatch.setattr(whole_file.os, "replace", full)
    else:
        monkeypatch.setattr(whole_file.os, "fdopen", lambda handle, *_, **__: _Full(handle))
    with pytest.raises(OSError, match="No space left"):
        whole_file.write_whole(path, "new" * 9999)
    assert names(tmp_path) == ["a.json"]
    assert path.read_text() == "old"


class _Full:
    """A file on a disk that fills up while it is written."""

    def __init__(self, handle):
        self.handle = handle

    def __enter__(self):
        return self

    def write(self, text):
        os.write(self.handle, text[:10].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    def __exit__(self, *_):
        os.close(self.handle)
