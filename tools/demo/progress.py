"""Signs of life on stderr: a bar on a terminal; elsewhere lines, at least one every ten seconds."""

from __future__ import annotations

import sys
import threading
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as Bar

BEAT_S = 8.0


class Progress:
    """One phase after another, each with a number of steps. Silent where ``show`` is False."""

    def __init__(self, show: bool = True) -> None:
        self._show = show
        self._bar: Bar | None = None
        self._task = None
        self._phase = ""
        self._done = 0
        self._total = 0
        self._started = time.monotonic()
        self._spoken = self._started
        self._stop = threading.Event()
        if not show:
            return
        if sys.stderr.isatty():
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description:<46}"),
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._bar.start()
        else:
            threading.Thread(target=self._beat, daemon=True).start()

    def phase(self, text: str, total: int = 1) -> None:
        """Begin a phase; the one before is taken as done."""
        self._phase, self._done, self._total = text, 0, total
        self._started = time.monotonic()
        if self._bar is not None:
            if self._task is not None:
                self._bar.stop_task(self._task)
            self._task = self._bar.add_task(text, total=total)
        else:
            self._say(f"{text} ...")

    def advance(self, note: str = "") -> None:
        """One step of the phase is done."""
        self._done += 1
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, description=f"{self._phase} {note}".strip())
        elif self._done == self._total or time.monotonic() - self._spoken > BEAT_S / 2:
            self._say(f"{self._phase}: {self._done} of {self._total} {note}".rstrip())

    def close(self) -> None:
        """No more output from here."""
        self._stop.set()
        if self._bar is not None:
            self._bar.stop()

    def _beat(self) -> None:
        while not self._stop.wait(1.0):
            if time.monotonic() - self._spoken > BEAT_S:
                self._say(
                    f"  {self._phase}: {self._done} of {self._total}, "
                    f"{time.monotonic() - self._started:.0f} s"
                )

    def _say(self, text: str) -> None:
        self._spoken = time.monotonic()
        if self._show and not self._stop.is_set():
            print(text, file=sys.stderr, flush=True)
