"""Tasks over processes: one that dies or hangs costs its task, not the run."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import preloaded

# Called once in each process; returns what does a task.
SetUp = Callable[..., Callable[[Any], dict[str, Any]]]


def _work(connection: Connection, set_up: SetUp, arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    do = set_up(*arguments)
    gc.collect()
    # modules are not looked through for garbage, which takes a third of a second each time
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)  # a compile makes many objects and few that are garbage
    while (task := connection.recv()) is not None:
        connection.send(do(task))


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    task: Any = None
    deadline: float = 0.0
    done: int = 0


def run(
    tasks: Iterable[Any],
    set_up: SetUp,
    arguments: tuple[Any, ...],
    jobs: int,
    timeout_s: float,
    started: Callable[[Any], None] = lambda task: None,
    lives: int = 1_000_000,
) -> Iterator[tuple[Any, dict[str, Any] | str]]:
    """Each task with its record, in the order in which they are done.

    ``set_up(*arguments)`` is called in each process, of which there are ``jobs``, and gives the
    function that does a task; a process is replaced after ``lives`` tasks. In place of a record
    stands "crash" if the process died, "timeout" if the task took longer than ``timeout_s``.
    """
    context = preloaded.context()
    left = iter(tasks)
    busy: list[_Worker] = []

    def start() -> _Worker:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, set_up, arguments), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def next_task(worker: _Worker | None) -> None:
        """Give the worker, or a new one in its place, the next task; without one, end it."""
        if worker is not None and worker.done >= lives:
            end(worker)
            worker = None
        for task in left:
            if worker is None:
                busy.append(worker := start())
            worker.task, worker.deadline = task, time.monotonic() + timeout_s
            started(task)
            worker.connection.send(task)
            return
        if worker is not None:
            end(worker)

    def end(worker: _Worker) -> None:
        worker.connection.send(None)
        worker.process.join(10)
        busy.remove(worker)

    def lost(worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        busy.remove(worker)
        next_task(None)

    for _ in range(jobs):
        next_task(None)
    while busy:
        ready = wait([worker.connection for worker in busy], timeout=1.0)
        for worker in list(busy):
            task = worker.task
            if worker.connection in ready:
                try:
                    record = worker.connection.recv()
                except (EOFError, ConnectionError):
                    lost(worker)
                    yield task, "crash"
                    continue
                worker.done += 1
                next_task(worker)
                yield task, record
            elif time.monotonic() > worker.deadline:
                lost(worker)
                yield task, "timeout"
