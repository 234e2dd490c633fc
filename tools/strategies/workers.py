"""Operators over processes: one that dies or hangs costs its operator, not the sweep."""

from __future__ import annotations

import logging
import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


def _work(connection: Connection, rules: str, limit: int) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch
    from strategies.operator import sweep
    from strategies.samples import operators

    torch.set_num_threads(1)
    if rules == "ours":
        import dynamo_dist

        dynamo_dist.enable()
    known = operators()
    while (name := connection.recv()) is not None:
        connection.send(sweep(name, known[name], limit).record())


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    name: str = ""
    deadline: float = 0.0


def run(
    names: list[str],
    rules: str,
    limit: int,
    jobs: int,
    timeout_s: float,
    started: Callable[[str], None] = lambda name: None,
) -> Iterator[dict[str, Any]]:
    """The record of each operator, in the order in which they are done.

    ``rules`` is "stock" or "ours". An operator whose process dies or takes longer than ``timeout_s``
    gets the verdict "crash" or "timeout".
    """
    context = multiprocessing.get_context("spawn")
    left = list(reversed(names))
    busy: list[_Worker] = []

    def start() -> _Worker:
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there, rules, limit), daemon=True)
        process.start()
        there.close()
        return _Worker(process, here)

    def assign(worker: _Worker) -> None:
        if not left:
            worker.connection.send(None)
            worker.process.join(10)
            busy.remove(worker)
            return
        worker.name = left.pop()
        worker.deadline = time.monotonic() + timeout_s
        started(worker.name)
        worker.connection.send(worker.name)

    def lost(worker: _Worker, verdict: str) -> dict[str, Any]:
        worker.process.kill()
        worker.process.join()
        busy.remove(worker)
        if left:
            busy.append(start())
            assign(busy[-1])
        return {"name": worker.name, "verdict": verdict, "counts": {}, "examples": {}}

    for _ in range(min(jobs, len(names))):
        busy.append(start())
        assign(busy[-1])
    while busy:
        ready = wait([worker.connection for worker in busy], timeout=1.0)
        for worker in list(busy):
            if worker.connection in ready:
                try:
                    record = worker.connection.recv()
                except (EOFError, ConnectionError):
                    yield lost(worker, "crash")
                    continue
                yield record
                assign(worker)
            elif time.monotonic() > worker.deadline:
                yield lost(worker, "timeout")
