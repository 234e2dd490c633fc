"""The job's store as the protocol uses it: each operation a value, so that a model can run it
step by step.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from inductor_passes.errors import PassesError
from inductor_passes.torch_compat.c10d import Store


class StoreFailedError(PassesError):
    """The job's store did not do what it was asked for, or holds what nobody of this version
    wrote.
    """


@dataclass(frozen=True, slots=True)
class Swap:
    """Write ``new`` if the key holds ``old``; a key that nobody wrote holds "". Answers what it
    holds then.
    """

    key: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Write:
    """Write several keys. Answers nothing."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ReadAll:
    """The values of several keys, or None if any of them was not written."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """Wait until a key is written, for as long as the deadline allows. Answers whether it was."""

    key: str


Operation = Swap | Write | ReadAll | Await
# Seconds between the tries of an operation that the store refuses: what it may have done before it
# failed does no harm when it is done again.
PAUSES_S = (0.05, 0.2, 0.5)
T = TypeVar("T")
Steps = Generator[Operation, Any, T]


def read(key: str) -> Steps[str]:
    """The value of a key, "" if nobody wrote it."""
    value: str = yield Swap(key, "", "")
    return value


def run(steps: Steps[T], store: Store, prefix: str, deadline_s: float) -> T:
    """Carry out a protocol's steps on a store. Raises StoreFailedError for what the store raises
    again and again.
    """
    end: float | None = None
    answer: Any = None
    while True:
        try:
            operation = steps.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        try:
            if isinstance(operation, Await):
                end = time.monotonic() + deadline_s if end is None else end
                answer = _await(store, prefix + operation.key, end)
            else:
                answer = _do_again(store, prefix, operation)
        except (RuntimeError, OSError, ValueError) as error:
            steps.close()
            raise StoreFailedError(f"{type(error).__name__}: {error}") from error


def _do_again(store: Store, prefix: str, operation: Operation) -> Any:
    for pause_s in PAUSES_S:
        try:
            return _do(store, prefix, operation)
        except (RuntimeError, OSError, ValueError):
            time.sleep(pause_s)
    return _do(store, prefix, operation)


def _do(store: Store, prefix: str, operation: Operation) -> Any:
    if isinstance(operation, Swap):
        return store.compare_set(prefix + operation.key, operation.old, operation.new).decode()
    if isinstance(operation, Write):
        keys = [prefix + key for key, _ in operation.values]
        _write(store, keys, [value for _, value in operation.values])
        return None
    assert isinstance(operation, ReadAll)
    keys = [prefix + key for key in operation.keys]
    if not store.check(keys):
        return None
    return [value.decode() for value in _get(store, keys)]


def _write(store: Store, keys: Sequence[str], values: Sequence[str]) -> None:
    if len(keys) > 1 and _has_many(store):
        store.multi_set(list(keys), list(values))  # type: ignore[attr-defined]
        return
    for key, value in zip(keys, values, strict=True):
        store.set(key, value)


def _get(store: Store, keys: Sequence[str]) -> list[bytes]:
    if len(keys) > 1 and _has_many(store):
        found: list[bytes] = store.multi_get(list(keys))  # type: ignore[attr-defined]
        return found
    return [store.get(key) for key in keys]


def _has_many(store: Store) -> bool:
    return bool(getattr(store, "has_extended_api", lambda: False)())


def _await(store: Store, key: str, end: float) -> bool:
    for pause_s in (*PAUSES_S, None):
        left = max(0.001, end - time.monotonic())
        try:
            store.wait([key], datetime.timedelta(seconds=left))
        except RuntimeError:  # how stores say that time is up, and that they fail
            if pause_s is None or time.monotonic() + pause_s >= end:
                break
            time.sleep(pause_s)
        else:
            return True
    return False  # a store that fails does so again at the next step
