"""Start the ranks, watch them, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

STOP_GRACE_S = 8.0
BEAT_S = 8.0


class RanksFailed(Exception):
    """The ranks ended badly or not in time; ``str()`` is what to tell the user."""


@contextlib.contextmanager
def terminated_like_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP unwind the stack, so that clean-up runs."""

    def unwind(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = {s: signal.signal(s, unwind) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def torchrun(script: Path, arguments: Sequence[str], ranks: int) -> list[str]:
    """The command that runs a script on this machine's ``ranks`` ranks."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*run, f"--nproc-per-node={ranks}", str(script), *arguments]


def watch(
    commands: Sequence[Sequence[str]],
    environments: Sequence[dict[str, str]],
    work: Path,
    deadline_s: float,
) -> None:
    """Run the commands side by side until all have ended.

    Their output goes to stderr. Raises RanksFailed as soon as one fails, or after ``deadline_s``.
    Whatever happens, every process that they started is gone afterwards: workers leave their id in
    ``work/rank*.pid``.
    """
    processes: list[subprocess.Popen[bytes]] = []
    start = spoken = time.monotonic()
    try:
        for command, environment in zip(commands, environments, strict=True):
            processes.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=sys.stderr,
                    start_new_session=True,
                )
            )
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes):
                break
            if time.monotonic() - start > deadline_s:
                raise RanksFailed(
                    f"The ranks did not end within {deadline_s:.0f} s and were stopped. One of "
                    "them hangs, or this machine is much slower than two cores: raise --deadline."
                )
            if not any(work.glob("rank*.pid")) and time.monotonic() - spoken > BEAT_S:
                spoken = time.monotonic()
                print(f"  ranks start: {spoken - start:.0f} s", file=sys.stderr, flush=True)
            time.sleep(0.1)
        codes = [process.returncode for process in processes]
        if any(codes):
            raise RanksFailed(
                f"A rank failed (exit codes {codes}); its error is above. If it speaks of a "
                "timeout, a rank hung or died: the one whose own error comes first."
            )
    finally:
        stop(processes, work)


def stop(processes: Sequence[subprocess.Popen[bytes]], work: Path) -> None:
    """End what is still running: politely, then not."""
    for process in processes:
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_GRACE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, end - time.monotonic()))
        if process.poll() is None:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
    for path in work.glob("rank*.pid"):
        # torchrun puts each worker in a session of its own.
        _signal_group(int(path.read_text()), signal.SIGKILL)
        path.unlink()


def _signal_group(leader: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(leader) != os.getpgid(0):
            os.killpg(os.getpgid(leader), signum)
