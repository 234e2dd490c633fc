"""Reports on disk."""

import json
import logging
import os
import stat

import pytest

from dynamo_dist.diagnostics import merge_ranks, read_report, write_report
from inductor_passes.report import report as write_module


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_one_process(report, tmp_path):
    folder = tmp_path / "a" / "b"
    written = write_report(report(rank=0, world_size=1), folder)
    assert written == tuple(folder / n for n in ("report.html", "report.json", "trace.json"))
    assert names(folder) == ["report.html", "report.json", "trace.json"]


def test_several_ranks_do_not_overwrite_each_other(report, tmp_path):
    for rank in (0, 3):
        write_report(report(rank=rank), str(tmp_path))
    assert names(tmp_path) == [
        "report.rank0.html",
        "report.rank0.json",
        "report.rank3.html",
        "report.rank3.json",
        "trace.rank0.json",
        "trace.rank3.json",
    ]


def test_a_merged_report_bears_no_rank(report, tmp_path):
    merged = merge_ranks([report(rank=0), report(rank=3)])
    assert len(write_report(merged, tmp_path)) == 3
    assert names(tmp_path) == ["report.html", "report.json", "trace.json"]
    assert len(json.loads((tmp_path / "report.json").read_text())["reports"]) == 2


def test_what_is_written_can_be_read(report, tmp_path):
    _, path, _ = write_report(report(), tmp_path)
    assert read_report(path) == report()


def test_the_trace_has_both_timelines_of_each_graph(report, tmp_path):
    *_, path = write_report(report(), tmp_path)
    trace = json.loads(path.read_text())
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == [
        "forward, before (simulated, rank 1)",
        "forward, after (simulated, rank 1)",
    ]
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 8


def test_a_second_report_replaces_the_first(report, tmp_path):
    write_report(report(), tmp_path)
    _, path, _ = write_report(report(breaks=()), tmp_path)
    assert read_report(path).breaks == ()
    assert len(names(tmp_path)) == 3


def test_files_are_as_readable_as_others(report, tmp_path):
    old = os.umask(0o027)
    try:
        written = write_report(report(), tmp_path)
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(old)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written} == {0o640}


def test_a_folder_that_cannot_be_made_costs_a_warning(report, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert write_report(report(), tmp_path / "file" / "folder") == ()
    (message,) = caplog.messages
    assert message.startswith(f"No report was written to {tmp_path / 'file' / 'folder'} (")
    assert "The compile goes on" in message
    assert "Give a folder that this process may write" in message


@pytest.mark.parametrize("failing", ["report.json", "trace.json"])
def test_a_full_disk_leaves_the_old_report_whole(report, tmp_path, caplog, monkeypatch, failing):
    first = write_report(report(rank=0, world_size=1), tmp_path)
    before = [path.read_text() for path in first]
    make = write_module.tempfile.mkstemp

    def full(*, dir, prefix):
        if failing in prefix:
            raise OSError(28, "No space left on device")
        return make(dir=dir, prefix=prefix)

    monkeypatch.setattr(write_module.tempfile, "mkstemp", full)
    assert write_report(report(rank=0, world_size=1, breaks=()), tmp_path) == ()
    assert [path.read_text() for path in first] == before
    assert names(tmp_path) == ["report.html", "report.json", "trace.json"]
    assert "No space left on device" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", 'must have type "object"'),
        ('{"schema": 7}', "has schema 7"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, text, message):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_report(path)
