"""Scripts as processes that start with torch imported, for tests that start many."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from preloaded import FOR_RANKS, as_script, context


class Script:
    """A script in a process of its own, with what tests use of ``subprocess.Popen``.

    The process is a fork: two of them hash equal strings alike, so that a test of what another
    process finds in caches starts others.
    """

    def __init__(
        self,
        path: Path | str,
        *arguments: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | str | None = None,
        together: Path | None = None,
    ) -> None:
        """``together``: a file for output and errors; else ``communicate()`` returns both."""
        self.args = [str(path), *map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory(prefix="script")
        names = [together] * 2 if together else [Path(self._folder.name, n) for n in "oe"]
        self._said = [Path(name) for name in names]
        self._process = context(FOR_RANKS).Process(
            target=as_script,
            args=(
                self.args[0],
                self.args[1:],
                dict(os.environ if env is None else env),
                *map(str, self._said),
                str(cwd or Path.cwd()),
            ),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the status once it has ended; raise ``subprocess.TimeoutExpired`` if it does
        not in time.
        """
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return output and errors once it has ended, or raise as ``wait`` does."""
        self.wait(timeout)
        out, errors = (said.read_text() for said in self._said)
        return out, errors

    def said(self) -> str:
        """What it has put out up to now."""
        return self._said[0].read_text() if self._said[0].exists() else ""

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()


def run_script(
    path: Path | str,
    *arguments: object,
    env: Mapping[str, str] | None = None,
    cwd: Path | str | None = None,
    timeout: float,
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end in a forked process, as ``subprocess.run`` would in a new one."""
    process = Script(path, *arguments, env=env, cwd=cwd)
    try:
        out, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.wait(), out, errors)
