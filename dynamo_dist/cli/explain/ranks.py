"""The reports of all ranks in one place: by a store that outlives the scripts.

Under torchrun that is its agent's. Under any other launcher the commands open one of their own at the address
where the scripts' process group met, which all ranks know, can reach, and have left when they end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from dynamo_dist.diagnostics.records import RunReport
from inductor_passes.torch_compat.c10d import Store

_POLL_S = 0.1
_OWN = "own"
_OPEN = "open"

log = logging.getLogger(__name__)


def agent_store(environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store that torchrun's agent holds, on whatever host; None where no such agent started us."""
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    # After a restart of the workers the reports of the earlier try are still there.
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return _store(given_address(environ), attempt)


def given_address(environ: Mapping[str, str] = os.environ) -> str:
    """``HOST:PORT`` where a launcher says that the ranks meet; "" if it does not."""
    host, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    return f"{host}:{port}" if host and port else ""


def own_store(address: str, is_host: bool, wait_s: float) -> Store | None:
    """A store at ``address``, ``HOST:PORT``: the command of rank 0 opens it, the others come to it.

    Where a store that nobody's script holds goes on answering there, it serves too. While rank 0's script
    runs its own answers: the others wait for its end, and for ``wait_s`` seconds where none answers. None
    where rank 0 opened nothing in that time, or at an interrupt.
    """
    if not is_host:
        return _come(address, wait_s)
    for is_master in (True, False):
        with contextlib.suppress(RuntimeError):  # torch's: the port is taken, nobody answers
            store = _store(address, _OWN, is_master)
            store.set(_OPEN, "")
            return store
    return None


def _come(address: str, wait_s: float) -> Store | None:
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + wait_s
    has_said = False
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < deadline:
            # A plain connection first: torch's would complain on standard error while none answers.
            with contextlib.suppress(OSError, RuntimeError):
                socket.create_connection((host, int(port)), timeout=1).close()
                store = _store(address, _OWN)
                if store.check([_OPEN]):
                    return store
                deadline = time.monotonic() + wait_s
                if not has_said:
                    has_said = True
                    log.warning(
                        "This rank's script has ended; its report waits for rank 0's. An interrupt shows "
                        "it alone."
                    )
            time.sleep(_POLL_S)
    return None


def _store(address: str, prefix: str, is_master: bool = False) -> Store:
    import torch.distributed

    dist: Any = torch.distributed  # its stores are public, but type checkers do not see them
    host, _, port = address.rpartition(":")
    store: Any = dist.TCPStore(
        host,
        int(port),
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=10),
    )
    prefixed: Store = dist.PrefixStore(f"dynamo_dist/explain/{prefix}", store)
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
