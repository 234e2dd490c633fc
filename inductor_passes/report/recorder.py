"""Record what the passes did to graphs: where records go, and how they survive a warm cache.

Graphs come without Dynamo from ``make_fx``, AOTAutograd or ``compile_fx`` called directly. They are
numbered as they come, like Dynamo numbers functions, so that ranks which compile the same graphs
give them the same ids.

On a warm cache Inductor runs no pass. But a cached graph brings the counters of its compile with
it: the pipeline stores each record in a file beside the cache, named by its content, and counts
that name. A name that was counted without being published is a graph from the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from inductor_passes import files
from inductor_passes.records import CacheRecord, GraphRecord, TimelineRecord
from inductor_passes.report.logs import log_graph
from inductor_passes.torch_compat import c10d, caches, dynamo

log = logging.getLogger(__name__)
T = TypeVar("T")


class Subscribers(Generic[T]):
    """Callbacks, in the order in which they came. Any thread may add, end and call."""

    def __init__(self) -> None:
        self._callbacks: dict[object, Callable[[T], object]] = {}

    def add(self, callback: Callable[[T], object]) -> Callable[[], object]:
        """Call ``callback`` with every later record; returns the function that ends it."""
        token = object()
        self._callbacks[token] = callback
        return lambda: self._callbacks.pop(token, None)

    def call(self, record: T) -> None:
        """Hand a record to every callback. One that raises is logged and does not stop the
        compile.
        """
        for callback in list(self._callbacks.values()):
            try:
                callback(record)
            except Exception:
                log.exception("A subscriber of records raised; the compile goes on.")


_OURS = "fx"
_numbers = itertools.count()


def compile_id() -> str:
    """Return the id of the compile in work: ``0/0`` by Dynamo, else ``fx0``, ``fx1``, ...

    Within one trace of AOTAutograd's it is the same each time, in the backward graph too; outside
    of any each call counts one further.
    """
    return dynamo.compile_id() or dynamo.own_id_of_trace(lambda: f"{_OURS}{next(_numbers)}")


def in_this_process(graph_id: str) -> str:
    """Return the id of a graph that another process has compiled, with a number of this one
    where it has a number.
    """
    name, _, phase = graph_id.rpartition(":")
    return f"{compile_id()}:{phase}" if name.startswith(_OURS) else graph_id


PREFIX = "inductor_passes.record."
_EPOCH = "inductor_passes.epoch"

_lock = threading.RLock()
_published: dict[str, int] = {}
# Records by id of their graph, each with its key: of graphs whose passes ran, and whose code is not
# made yet.
Pending = dict[str, tuple[str, GraphRecord]]


# Takes every later record, once it is complete; returns the function that ends it.
_subscribers: Subscribers[GraphRecord] = Subscribers()
subscribe = _subscribers.add
_subscribers.add(log_graph)


def publish(record: GraphRecord, key: str = "") -> None:
    """Hand a record that is complete to every subscriber, the logs first; under ``key`` a warm
    cache finds it again.
    """
    if key:
        store(key, record)
    _subscribers.call(_with_own_groups(record))


def _with_own_groups(record: GraphRecord) -> GraphRecord:
    """The record with its groups as this process calls them: the graph has names of all ranks,
    and may be another's.
    """

    def timeline(of: TimelineRecord) -> TimelineRecord:
        spans = (dataclasses.replace(span, lane=c10d.own_name(span.lane)) for span in of.spans)
        return dataclasses.replace(of, spans=tuple(spans))

    collectives = (
        dataclasses.replace(each, group_name=c10d.own_name(each.group_name))
        for each in record.collectives
    )
    return dataclasses.replace(
        record,
        collectives=tuple(collectives),
        before=timeline(record.before),
        after=timeline(record.after),
    )


def compiled(record: GraphRecord, pending: Pending | None = None) -> bool:
    """Count the record of a graph that is compiled just now, and publish it, or put it among those
    to be completed.

    Returns whether it is published.
    """
    key = hashlib.sha256(json.dumps(record.to_json(), sort_keys=True).encode()).hexdigest()[:24]
    with _lock:
        _counts()[PREFIX + key] += 1
        _published[key] = _published.get(key, 0) + 1
    if pending is not None:
        pending[record.graph_id] = key, record
        return False
    publish(record, key)
    return True


def complete(pending: Pending, order_kept: Callable[[GraphRecord], bool | None]) -> None:
    """Publish records of graphs whose code is made, with whether it keeps their order."""
    for key, record in pending.values():
        publish(dataclasses.replace(record, order_kept=order_kept(record)), key)


def store(key: str, record: GraphRecord) -> None:
    """Write a record beside Inductor's cache."""
    keep("records", key, record.to_json())


def load_record(key: str) -> GraphRecord | None:
    """The stored record, or None if it is gone or of another version."""
    try:
        return GraphRecord.from_json(kept("records", key))
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def keep(kind: str, name: str, data: dict[str, Any]) -> None:
    """Write a file beside Inductor's cache, whole or not at all. A full disk only costs a
    warning.
    """
    folder = _folder(kind)
    try:
        files.put(folder, f"{name}.json", json.dumps(data))
    except OSError as error:
        log.warning(
            "The record of a compiled graph could not be stored (%s): reports of later runs that "
            "find this graph in the cache will lack it. Make %s writable.",
            error,
            folder,
        )


def kept(kind: str, name: str) -> Any:
    """What such a file holds, or None if it is gone or cannot be read."""
    try:
        with open(os.path.join(_folder(kind), f"{name}.json")) as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    return data


def publish_cached(
    rename: Callable[[GraphRecord], str] = lambda record: in_this_process(record.graph_id),
    cache: str = "torch's cache",
) -> list[GraphRecord]:
    """Publish, and return, the records of graphs that came from ``cache`` since the last call.

    ``rename`` gives a record its ``graph_id`` in this process.
    """
    fresh: list[tuple[str, int]] = []
    published: list[GraphRecord] = []
    with _lock:
        for name, count in list(_counts().items()):
            if name.startswith(PREFIX):
                key = name.removeprefix(PREFIX)
                missing = count - _published.get(key, 0)
                if missing > 0:
                    _published[key] = count
                    fresh.append((key, missing))
    for key, times in fresh:
        record = load_record(key)
        if record is None:
            log.info("A graph came from the cache, but its record %s is gone.", key)
            continue
        for _ in range(times):
            hit = CacheRecord("hit", (cache,))
            named = dataclasses.replace(record, graph_id=rename(record), cache=hit)
            published.append(named)
            publish(named)
    return published


def _folder(kind: str) -> str:
    return os.path.join(caches.cache_dir(), "inductor_passes", kind)


def _counts() -> dict[str, int]:
    """Inductor's counters; if somebody cleared them, what we published counts from zero again."""
    counts = caches.counters()
    if _EPOCH not in counts:
        _published.clear()
        counts[_EPOCH] = 1
    return counts


@contextlib.contextmanager
def records_of_block() -> Iterator[list[GraphRecord]]:
    """The records published while the block runs, each ``graph_id`` once, in first-seen order."""
    records: dict[str, GraphRecord] = {}

    def keep(record: GraphRecord) -> None:
        records[record.graph_id] = record

    result: list[GraphRecord] = []
    unsubscribe = subscribe(keep)
    try:
        yield result
    finally:
        publish_cached()
        unsubscribe()
        result.extend(records.values())
