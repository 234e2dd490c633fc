"""Run a script in a process of its own and stay out of its way: signals go through, it dies with us."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What a terminal sends to every process in its foreground.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


@contextlib.contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], *, quiet: bool = False
) -> Iterator[Callable[[], int]]:
    """Start it; the function given waits for its exit status, negative for a signal.

    On a terminal the script stays in the foreground, and the terminal's own signals reach it without
    us; elsewhere it gets a process group of its own, and each signal once, from us. In the block no
    signal but an interrupt after the script's end stops us: torchrun ends all ranks when one has
    failed, and that is when a report is wanted. ``quiet``: what it prints goes to standard error.
    """
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: Any) -> None:
        if process is not None and process.returncode is None:
            if not (at_terminal and number in _FROM_TERMINAL):
                process.send_signal(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    with _handlers((*_FORWARDED, *_FROM_TERMINAL), forward):
        process = subprocess.Popen(
            command,
            env=dict(environ),
            stdout=sys.stderr if quiet else None,
            process_group=None if at_terminal else 0,
            preexec_fn=_dies_with_us(),
        )
        yield process.wait


def end_like(status: int) -> int:
    """End as the script did: returns its exit status, or is killed by the same signal."""
    if status >= 0:
        return status
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(OSError, ValueError):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 128 - status


def interpreter() -> list[str]:
    """This Python with the flags it was started with."""
    given = sys.orig_argv
    flags = given[1 : given.index("-m")] if "-m" in given else []
    return [sys.executable, *flags]


@contextlib.contextmanager
def _handlers(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Not SIG_IGN, which the script would inherit; and what was ignored, as under nohup, stays so."""
    before = {
        number: signal.signal(number, handler)
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


def _dies_with_us() -> Callable[[], object] | None:
    """On Linux a killed launcher leaves no script behind."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
