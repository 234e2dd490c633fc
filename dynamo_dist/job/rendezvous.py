"""Ranks meet and exchange small records through the c10d store, with a deadline.

A collective would hang when a rank is missing or has taken another path; a store can be asked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dynamo_dist.errors import CompareError
from inductor_passes.torch_compat.c10d import Store

_POLL_S = 0.05
# How long a failed rank waits for the others to say how they fared.
GRACE_S = 30.0
_calls = itertools.count()


class Rendezvous:
    """The ranks of one call. Every rank makes its n-th object in its n-th call, so prefixes agree.

    deadline_s bounds each meeting. With ``store=None`` there is one rank, and nothing to wait for.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int = 0,
        world_size: int = 1,
        deadline_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.store = store
        self.rank = rank
        self.world_size = world_size if store is not None else 1
        self.deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep
        self._prefix = f"dynamo_dist/compare/{next(_calls)}"

    def meet(self, phase: str, payload: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """Wait for every rank to reach ``phase``; returns their payloads in rank order.

        Raises CompareError naming the ranks that did not come within ``deadline_s``.
        """
        if self.store is None:
            return [dict(payload or {})]
        self._set(f"{phase}/{self.rank}", json.dumps(payload or {}))
        self._wait(phase, range(self.world_size), self.deadline_s)
        return [json.loads(self._get(f"{phase}/{rank}")) for rank in range(self.world_size)]

    def conclude(self, phase: str, error: BaseException | None) -> dict[int, str]:
        """Tell the others how ``phase`` ended here; returns the ranks that failed, with the reason.

        Raises CompareError naming ranks that say nothing. A rank that failed waits ``GRACE_S`` for
        the others to fail too: a dead peer shows here as a broken connection, and is to be named.
        """
        # The first paragraph: torch appends advice on its own debugging variables.
        first = str(error).split("\n\n")[0].strip()
        mine = "" if error is None else f"{type(error).__name__}: {first}"
        if self.store is None:
            return {self.rank: mine} if mine else {}
        try:
            outcomes = self._outcomes(phase, mine)
        except CompareError as other:
            if error is None:
                raise
            what = f"compare() failed on rank {self.rank} while {phase}: {mine}"
            raise CompareError(what, str(other)) from error
        return {rank: text for rank, text in outcomes.items() if text}

    def leave(self) -> None:
        """Rank 0 stays until every rank is done asking: its process usually holds the store.

        To be called when all that was to be learnt is known; whoever is late then is not waited for
        longer than ``GRACE_S``.
        """
        if self.store is None:
            return
        with contextlib.suppress(CompareError):
            self._set(f"left/{self.rank}", "")
            if self.rank == 0:
                self._wait("left", range(self.world_size), min(GRACE_S, self.deadline_s))

    def _outcomes(self, phase: str, mine: str) -> dict[int, str]:
        self._set(f"{phase}/{self.rank}", json.dumps({"failed": mine}))
        everyone = range(self.world_size)
        self._wait(phase, everyone, min(GRACE_S, self.deadline_s) if mine else self.deadline_s)
        return {rank: json.loads(self._get(f"{phase}/{rank}"))["failed"] for rank in everyone}

    def _wait(self, phase: str, ranks: Sequence[int], deadline_s: float) -> None:
        end = self._clock() + deadline_s
        missing = list(ranks)
        while missing := [rank for rank in missing if not self._has(f"{phase}/{rank}")]:
            if self._clock() >= end:
                raise CompareError(
                    f"No sign of {_ranks(missing)} within {deadline_s:.0f} s at '{phase}'.",
                    "The process has died, hangs in a collective, or never called compare().",
                    "See the log of that rank. Every rank must call compare() equally often; raise "
                    "timeout_s if compiles take longer.",
                )
            self._sleep(_POLL_S)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _set(self, name: str, value: str) -> None:
        self._ask(lambda store: store.set(self._key(name), value))

    def _get(self, name: str) -> str:
        return str(self._ask(lambda store: store.get(self._key(name))).decode())

    def _has(self, name: str) -> bool:
        return bool(self._ask(lambda store: store.check([self._key(name)])))

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        assert self.store is not None
        try:
            return question(self.store)
        except RuntimeError as error:  # DistNetworkError and DistStoreError among them
            raise CompareError(
                "The store of the process group does not answer.",
                f"The rank or agent that holds it, usually rank 0, has gone: {error}",
            ) from error


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
