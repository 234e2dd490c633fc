"""Processes that are ranks: lent to program after program, replaced after some, and after a
failure.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import preloaded
import torch.distributed as dist
from fuzzing.unlike.draw import draw
from fuzzing.unlike.idle import Idleness
from fuzzing.unlike.rank import serve

STARTING_S = 300.0  # to import torch on a busy machine
LONGEST = 10  # times the pool's time, for a program that computes all the while
LIVES = 6  # programs; threads of the groups of all that ran before compute on, for nobody
GRACE_S = 5.0  # for others to say what is wrong, after the first


@dataclass
class Answers:
    """What the ranks of one program said. ``last``: the last step that each began; ``idle_s``: the
    longest time for which none of them computed anything."""

    done: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, tuple[list[str], str, str]] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    last: dict[int, str] = field(default_factory=dict)
    idle_s: float = 0.0


@dataclass
class _Rank:
    process: BaseProcess
    connection: Connection


class Pool:
    """``size`` ranks, of which a program uses the first. A context manager."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.ranks: list[_Rank] = []
        self.logs = tempfile.TemporaryDirectory(prefix="unlike-logs")
        self.count = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.logs.cleanup()

    def run(self, seed: int, meshes: tuple[tuple[int, ...], ...]) -> Answers:
        """Have the ranks run a program; ranks that do nothing for the pool's time are late."""
        if not self.ranks:
            self._start()
        members = dict(enumerate(self.ranks[: draw(seed, meshes).ranks]))
        self.count += 1
        with tempfile.TemporaryDirectory(prefix="unlike", ignore_cleanup_errors=True) as folder:
            for rank in members.values():
                rank.connection.send((f"{self.count}", seed, meshes, folder))
            answers = self._answers(members)
            if answers.errors or answers.died or answers.late or self.count % LIVES == 0:
                self.stop()
        return answers

    def _answers(self, members: dict[int, _Rank]) -> Answers:
        answers = Answers()
        idleness = Idleness([rank.process.pid for rank in members.values()])
        end = time.monotonic() + LONGEST * self.timeout_s
        open_ = {rank.connection: at for at, rank in members.items()}
        while open_ and time.monotonic() < end and idleness.now_s() < self.timeout_s:
            for ready in wait(list(open_), timeout=1.0):
                idleness.stirred()
                at = open_[ready]  # type: ignore[index]
                try:
                    word, what = ready.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    word, what = "died", None
                if word == "beat":
                    answers.last[at] = what
                    continue
                del open_[ready]  # type: ignore[arg-type]
                if word == "done":
                    answers.done[at] = what
                    continue
                if word == "error":
                    answers.errors[at] = what
                else:
                    answers.died.append(at)
                end = min(end, time.monotonic() + GRACE_S)
        answers.late = sorted(open_.values())
        answers.idle_s = idleness.longest_s
        return answers

    def _start(self) -> None:
        context = preloaded.context(preloaded.FOR_RANKS)
        for rank in range(self.size):
            here, there = context.Pipe()
            log = str(Path(self.logs.name) / f"{rank}")
            process = context.Process(
                target=serve, args=(rank, self.store.port, there, log), daemon=True
            )
            process.start()
            there.close()
            self.ranks.append(_Rank(process, here))
        for each in self.ranks:
            if not each.connection.poll(STARTING_S):
                raise TimeoutError(f"rank did not start: {self.log()}")
            each.connection.recv()

    def stop(self) -> None:
        """End all ranks; the next program starts others."""
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
        self.ranks = []

    def log(self) -> str:
        """The ends of what the ranks' processes wrote."""
        files = sorted(Path(self.logs.name).glob("*"))
        return "\n".join(
            f"-- rank {file.name}\n{file.read_text(errors='replace')[-2000:]}" for file in files
        )
