"""``python -m dynamo_dist report``: what is on disk, as one."""

import json

import pytest

from dynamo_dist.__main__ import main
from dynamo_dist.diagnostics import RunReport, write_report


@pytest.fixture
def folder(tmp_path):
    for rank in range(2):
        write_report(RunReport(rank=rank, world_size=2, torch_version="2.13.0"), tmp_path / "out")
    return tmp_path / "out"


def test_ranks_of_a_folder_are_merged(folder, tmp_path, capsys):
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main(["report", str(folder), "--html", str(page), "--trace", str(trace)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("2 ranks agree in breaks, graphs, launches, payloads and order.")
    assert err == f"wrote {page}\nwrote {trace}\n"
    assert "2 of 2 ranks" in page.read_text()


def test_a_character_that_no_file_can_hold_is_replaced(tmp_path, capsys):
    path, page = tmp_path / "report.json", tmp_path / "page.html"
    path.write_text(json.dumps(RunReport(torch_version="\ud800").to_json()))
    assert main(["report", str(path), "--html", str(page)]) == 0
    assert "torch ?" in page.read_text()


def test_json_is_explains_and_can_be_read_again(folder, tmp_path, capsys):
    assert main(["report", "--json", str(folder / "report.rank1.json")]) == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["missing"] == [0]
    merged = tmp_path / "merged.json"
    merged.write_text(printed)
    assert main(["report", "--json", str(merged)]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "left, why",
    [
        ({}, "holds no report*.json"),
        ({"report.json": "[]"}, 'must have type "object". Correct the file. Pass a report.json'),
        ({"report.json": "{"}, "is not JSON"),
    ],
)
def test_nothing_to_show(left, why, tmp_path, capsys):
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err
    assert main(["report", "--json", str(tmp_path)]) == 2
    assert why in json.loads(capsys.readouterr().out)["error"]


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_two_runs_are_not_one(folder, capsys):
    write_report(RunReport(), folder)
    assert main(["report", str(folder)]) == 2
    assert "They are of different runs" in capsys.readouterr().err
