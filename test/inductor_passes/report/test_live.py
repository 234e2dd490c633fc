"""The report that is kept up to date while a process compiles."""

import json

import pytest

from inductor_passes.report import recorder, report
from inductor_passes.testing import fake_group


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a live report whose end of the process can be played."""
    ends = []
    monkeypatch.setattr(report.atexit, "register", ends.append)
    report.process_graphs.cache_clear()
    refresh = report.live_graphs(str(tmp_path))
    (finish,) = ends
    return tmp_path, refresh, finish


def graphs(path, name="report.json"):
    return [g["graph_id"] for g in json.loads((path / name).read_text())["graphs"]]


def test_each_refresh_brings_the_folder_up_to_date(folder, graph):
    path, refresh, _ = folder
    recorder.publish(graph(graph_id="a"))
    assert list(path.iterdir()) == []
    refresh()
    assert graphs(path) == ["a"]
    recorder.publish(graph(graph_id="b"))
    refresh()
    assert graphs(path) == ["a", "b"]


def test_report_of_many_graphs_is_written_seldom_and_at_the_end(folder, graph):
    path, refresh, finish = folder
    sizes = []
    for number in range(20):
        recorder.publish(graph(graph_id=str(number)))
        refresh()
        sizes.append(len(graphs(path)))
    assert sizes == [1, 2, 3, 4, 5, 6, 7, 8, 8, 10, 10, 10, 13, 13, 13, 13, 17, 17, 17, 17]
    finish()
    assert len(graphs(path)) == 20


def test_the_end_of_a_process_keeps_its_rank(folder, graph):
    path, refresh, finish = folder
    with fake_group(8, rank=3):
        recorder.publish(graph(graph_id="a"))
        refresh()
    recorder.publish(graph(graph_id="b"))
    finish()
    assert sorted(p.name for p in path.glob("report*.json")) == ["report.rank3.json"]
    assert len(graphs(path, "report.rank3.json")) == 2


def test_a_process_that_compiled_nothing_writes_nothing(folder):
    path, _, finish = folder
    finish()
    assert list(path.iterdir()) == []
