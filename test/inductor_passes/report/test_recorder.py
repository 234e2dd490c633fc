import dataclasses

import pytest

from inductor_passes.records import CacheRecord, GraphRecord, PassRecord, SpanRecord, TimelineRecord
from inductor_passes.report import recorder
from inductor_passes.torch_compat import caches

EMPTY = TimelineRecord((SpanRecord("compute", "mm", "mm", 0.0, 2.0),), 2.0, 2.0, 0.0, 0.0, 64)


def record(graph_id="0/0:forward", **changes):
    ran = PassRecord("share_launches", "bitwise", "ran", True, {"launches_removed": 1}, 0.5)
    base = GraphRecord(graph_id, "forward", 3, "h100x8", (ran,), (), EMPTY, EMPTY, ("kernel",))
    return dataclasses.replace(base, **changes)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(recorder, "_published", {})
    counts = caches.counters()
    saved = dict(counts)
    counts.clear()
    yield tmp_path
    counts.clear()
    counts.update(saved)


@pytest.fixture
def seen():
    """Every record that is published."""
    records = []
    unsubscribe = recorder.subscribe(records.append)
    yield records
    unsubscribe()


def counted():
    """The key of the one record that was counted."""
    (name,) = [name for name in caches.counters() if name.startswith(recorder.PREFIX)]
    return name.removeprefix(recorder.PREFIX)


def test_a_record_survives_json():
    assert GraphRecord.from_json(record().to_json()) == record()
    with pytest.raises(ValueError, match="schema"):
        GraphRecord.from_json({**record().to_json(), "schema": 0})


def test_a_compiled_record_is_stored_and_published_once():
    with recorder.records_of_block() as got:
        assert recorder.compiled(record())
    assert got == [record()]
    assert recorder.load_record(counted()) == record()
    assert recorder.publish_cached() == []


def test_cache_hit_publishes_the_stored_record_under_a_new_id():
    recorder.compiled(record())
    key = counted()
    seen = []
    unsubscribe = recorder.subscribe(seen.append)
    caches.counters()[recorder.PREFIX + key] += 1  # what a cache hit does
    assert len(recorder.publish_cached(lambda r: "1/0:" + r.phase)) == 1
    unsubscribe()
    assert seen == [record("1/0:forward", cache=CacheRecord("hit", ("torch's cache",)))]
    assert recorder.publish_cached() == []


def test_cleared_counters_do_not_hide_a_cache_hit():
    recorder.compiled(record())
    key = counted()
    caches.counters().clear()
    caches.counters()[recorder.PREFIX + key] += 1
    assert len(recorder.publish_cached()) == 1


def test_a_record_is_published_once_when_it_is_complete(seen):
    pending = {}
    assert not recorder.compiled(record(), pending)
    assert seen == [] and len(pending) == 1
    recorder.complete(pending, lambda one: True)
    assert seen == [record(order_kept=True)]
    assert recorder.load_record(counted()).order_kept is True
    assert recorder.publish_cached() == []


def test_last_record_counts_where_passes_ran_twice(seen):
    pending = {}
    for count in (1, 2):
        recorder.compiled(record(node_count=count), pending)
    recorder.complete(pending, lambda one: True)
    assert [one.node_count for one in seen] == [2]


def test_failing_subscriber_stops_neither_compile_nor_others(caplog):
    seen = []

    def bad(_):
        raise ValueError("no")

    ends = [recorder.subscribe(bad), recorder.subscribe(seen.append)]
    recorder.publish(record())
    for end in ends:
        end()
    assert seen == [record()]
    assert "the compile goes on" in caplog.text


def test_an_unwritable_cache_costs_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(caches, "cache_dir", lambda: "/proc/nowhere")
    recorder.store("k", record())
    assert "could not be stored" in caplog.text
