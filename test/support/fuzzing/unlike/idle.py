"""How long processes have done nothing: a rank that hangs computes nothing, one on a busy
machine a little.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

_BUSY = 0.02  # of one core, for each process: from here on they do something


class Idleness:
    """``now_s()``: for how long the processes have been idle; ``longest_s``: the longest that
    was. Linux.
    """

    def __init__(self, processes: Sequence[int | None]) -> None:
        self.processes = [each for each in processes if each is not None]
        self.longest_s = 0.0
        self._worked = self._seconds()
        self._asked = self._since = time.monotonic()

    def now_s(self) -> float:
        """To be asked about once a second."""
        now, worked = time.monotonic(), self._seconds()
        if now - self._asked >= 0.5:
            if worked - self._worked > _BUSY * len(self.processes) * (now - self._asked):
                self._since = now
            self._asked, self._worked = now, worked
            self.longest_s = max(self.longest_s, now - self._since)
        return now - self._since

    def stirred(self) -> None:
        """Somebody has said something."""
        self._since = time.monotonic()

    def _seconds(self) -> float:
        total = 0.0
        for process in self.processes:
            try:
                fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return total
