"""Graph records: where they go, and how they survive a warm cache.

On a warm cache Inductor runs no pass. But a cached graph brings the counters of its compile with
it: the pipeline stores each record in a file beside the cache, named by its content, and counts
that name. A name that was counted without being published is a graph from the cache.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator

from inductor_passes.files import folder as record_folder
from inductor_passes.records import GraphRecord
from inductor_passes.torch_compat import caches

log = logging.getLogger(__name__)

PREFIX = "inductor_passes.record."
_EPOCH = "inductor_passes.epoch"

Subscriber = Callable[[GraphRecord], None]

_lock = threading.RLock()
_subscribers: list[Subscriber] = []
_published: dict[str, int] = {}
_compiling: contextvars.ContextVar[list[tuple[str, GraphRecord]] | None] = contextvars.ContextVar(
    "compiling", default=None
)


def subscribe(callback: Subscriber) -> Callable[[], None]:
    """Call ``callback`` with every later record; returns the function that ends it.

    The same ``graph_id`` may come twice, the later with more known: it replaces the earlier.
    """
    with _lock:
        _subscribers.append(callback)

    def unsubscribe() -> None:
        with _lock, contextlib.suppress(ValueError):
            _subscribers.remove(callback)

    return unsubscribe


def publish(record: GraphRecord) -> None:
    """Hand a record to every subscriber. One that raises is logged and does not stop the compile."""
    with _lock:
        targets = list(_subscribers)
    for target in targets:
        try:
            target(record)
        except Exception:
            log.exception("A subscriber of graph records raised; the compile goes on.")


def compiled(record: GraphRecord) -> str:
    """Store, count and publish the record of a graph compiled just now; returns its key."""
    key = hashlib.sha256(json.dumps(record.to_json(), sort_keys=True).encode()).hexdigest()[:24]
    store(key, record)
    with _lock:
        counts = _counts()
        counts[PREFIX + key] += 1
        _published[key] = _published.get(key, 0) + 1
    current = _compiling.get()
    if current is not None:
        current.append((key, record))
    publish(record)
    return key


@contextlib.contextmanager
def compiling() -> Iterator[list[tuple[str, GraphRecord]]]:
    """The keys and records of the graphs compiled in the block, by this thread."""
    fresh: list[tuple[str, GraphRecord]] = []
    token = _compiling.set(fresh)
    try:
        yield fresh
    finally:
        _compiling.reset(token)


def is_followed() -> bool:
    """Return whether this thread compiles inside ``compiling()``."""
    return _compiling.get() is not None


def amend(key: str, record: GraphRecord) -> None:
    """Replace a stored record by one with more known, and publish it again."""
    store(key, record)
    publish(record)


def store(key: str, record: GraphRecord) -> None:
    """Write a record beside Inductor's cache, whole or not at all. A full disk only costs a warning."""
    folder = _folder()
    try:
        record_folder.put(folder, key + ".json", json.dumps(record.to_json()))
    except OSError as error:
        log.warning(
            "The record of a compiled graph could not be stored (%s): reports of later runs that "
            "find this graph in the cache will lack it. Make %s writable.",
            error,
            folder,
        )


def load_record(key: str) -> GraphRecord | None:
    """The stored record, or None if it is gone or of another version."""
    try:
        with open(os.path.join(_folder(), key + ".json")) as file:
            return GraphRecord.from_json(json.load(file))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def publish_cached(rename: Callable[[GraphRecord], str] | None = None) -> list[GraphRecord]:
    """Publish, and return, the records of graphs that came from a cache since the last call.

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
            named = dataclasses.replace(record, graph_id=rename(record)) if rename else record
            published.append(named)
            publish(named)
    return published


def _folder() -> str:
    return os.path.join(caches.cache_dir(), "inductor_passes", "records")


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
