"""The reports of all ranks in one place: by the store of torchrun's agent, which outlives the scripts."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from dynamo_dist.reporting.records import RunReport

_POLL_S = 0.1


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is needed."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


def agent_store(environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store that torchrun's agent holds, on whatever host; None where no such agent started us."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    import torch.distributed

    dist: Any = torch.distributed  # its stores are public, but type checkers do not see them

    # After a restart of the workers the reports of the earlier try are still there.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store: Any = dist.TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    prefixed: Store = dist.PrefixStore(f"dynamo_dist/explain/{attempt}", store)
    return prefixed


def give(store: Store, report: RunReport) -> None:
    """Leave this rank's report for rank 0."""
    store.set(str(report.rank), json.dumps(report.to_json()))


def take(store: Store, ranks: Sequence[int], wait_s: float) -> list[RunReport]:
    """The reports of ``ranks`` that come within ``wait_s`` seconds."""
    deadline = time.monotonic() + wait_s
    reports: list[RunReport] = []
    waiting = list(ranks)
    while waiting:
        come = [rank for rank in waiting if store.check([str(rank)])]
        reports += [RunReport.from_json(json.loads(store.get(str(rank)))) for rank in come]
        waiting = [rank for rank in waiting if rank not in come]
        if time.monotonic() > deadline:
            break
        if waiting:
            time.sleep(_POLL_S)
    return reports
