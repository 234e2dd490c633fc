"""The report that is kept up to date while a process compiles."""

import pytest

from dynamo_dist.reporting import live, read_report
from dynamo_dist.testing import fake_mesh
from inductor_passes.reporting import recorder


@pytest.fixture(autouse=True)
def silent():
    live.stop()
    yield
    live.stop()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of a live report whose end of the process can be played."""
    ends = []
    monkeypatch.setattr(live.atexit, "register", ends.append)
    refresh = live.live_report(str(tmp_path))
    stop, finish = ends  # run last first
    assert stop is live.stop
    return tmp_path, refresh, finish


def graphs(path):
    return [g.graph_id for g in read_report(path / "report.json").graphs]


def test_each_refresh_brings_the_folder_up_to_date(folder, graph):
    path, refresh, _ = folder
    recorder.publish(graph(graph_id="a"))
    assert list(path.iterdir()) == []
    refresh()
    assert graphs(path) == ["a"]
    recorder.publish(graph(graph_id="b"))
    refresh()
    assert graphs(path) == ["a", "b"]


def test_with_many_graphs_not_every_one_writes_and_the_end_writes_the_rest(folder, graph):
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
    with fake_mesh(8, rank=3):
        recorder.publish(graph(graph_id="a"))
        refresh()
    recorder.publish(graph(graph_id="b"))
    finish()
    assert sorted(p.name for p in path.glob("report*.json")) == ["report.rank3.json"]
    assert len(read_report(path / "report.rank3.json").graphs) == 2


def test_after_stop_the_end_keeps_what_was_seen(folder, graph):
    path, refresh, finish = folder
    recorder.publish(graph(graph_id="a"))
    refresh()
    live.stop()
    recorder.publish(graph(graph_id="b"))
    finish()
    assert graphs(path) == ["a"]


def test_a_process_that_compiled_nothing_writes_nothing(folder):
    path, _, finish = folder
    finish()
    assert list(path.iterdir()) == []
