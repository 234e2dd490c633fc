"""``python -m dynamo_dist explain SCRIPT``: run a script on all its ranks and report its breaks and
graphs.

``--json`` prints one object and nothing else: ``{schema, world_size, missing, differences,
reports}``, as ``dynamo_dist.diagnostics.records`` describes it, or ``{"error": why}`` where there
is no report; what the script prints goes to standard error then. The exit status is the script's
own.

Under torchrun that is its agent's. Under any other launcher the commands open one of their own at
the address where the scripts' process group met, which all ranks know, can reach, and have left
when they end.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import importlib.metadata
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed

from dynamo_dist.cli import explained_process
from dynamo_dist.diagnostics import Fact, RunReport, merge_ranks
from dynamo_dist.diagnostics.records import json_schema
from dynamo_dist.diagnostics.render import render_html, render_text, trace
from inductor_passes.torch_compat.c10d import Store

if TYPE_CHECKING:
    from types import FrameType

    from dynamo_dist.diagnostics import MergedReport, RunReport


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--json``, ``--html FILE``, ``--trace FILE``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--html", metavar="FILE", help="write the page, one file that works offline"
    )
    parser.add_argument("--trace", metavar="FILE", help="write the timelines for ui.perfetto.dev")


def fail(arguments: argparse.Namespace, why: str) -> None:
    """Say why there is no report: ``{"error": why}`` with ``--json``."""
    if arguments.json:
        print(json.dumps({"error": why}))
    else:
        print(f"error: {why}", file=sys.stderr)


def show(arguments: argparse.Namespace, merged: MergedReport, infix: str = "") -> None:
    """Print the report and write its files. ``infix`` keeps apart the files of ranks not merged."""
    report: RunReport | MergedReport = merged if merged.first.world_size > 1 else merged.first
    if arguments.json:
        print(json.dumps(merged.to_json(), indent=2))
    else:
        render_text(report)
    if arguments.html:
        _write(arguments.html, infix, render_html(report))
    if arguments.trace:
        _write(arguments.trace, infix, json.dumps(trace(merged)))


def _write(name: str, infix: str, text: str) -> None:
    path = Path(name)
    path = path.with_name(f"{path.stem}{infix}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        print(f"error: {path} was not written: {error.strerror}.", file=sys.stderr)
    else:
        print(f"wrote {path}", file=sys.stderr)


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What a terminal sends to every process in its foreground.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT)


@contextlib.contextmanager
def running(
    command: Sequence[str], environ: Mapping[str, str], *, quiet: bool = False
) -> Iterator[Callable[[], int]]:
    """Start it; the function given waits for its exit status, negative for a signal.

    On a terminal the script stays in the foreground, and the terminal's own signals reach it
    without us; elsewhere it gets a process group of its own, and each signal once, from us. In the
    block no signal but an interrupt after the script's end stops us: torchrun ends all ranks when
    one has failed, and that is when a report is wanted. ``quiet``: what it prints goes to standard
    error.
    """
    at_terminal = sys.stdin is not None and sys.stdin.isatty()
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, frame: FrameType) -> None:
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
    """Not SIG_IGN, which the script would inherit; and what was ignored, as under nohup, stays
    so.
    """
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
    """Return a hook that kills the script when its launcher is killed; None except on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_POLL_S = 0.1
_OWN = "own"
_OPEN = "open"

log = logging.getLogger(__name__)


def agent_store(environ: Mapping[str, str] = os.environ) -> Store | None:
    """The store that torchrun's agent holds, on whatever host; None where no such agent started
    us.
    """
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

    Where a store that nobody's script holds goes on answering there, it serves too. While rank 0's
    script runs its own answers: the others wait for its end, and for ``wait_s`` seconds where none
    answers. None where rank 0 opened nothing in that time, or at an interrupt.
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
    has_warned = False
    with contextlib.suppress(KeyboardInterrupt):
        while time.monotonic() < deadline:
            # A plain connection first: torch's would complain on standard error while none answers.
            with contextlib.suppress(OSError, RuntimeError):
                socket.create_connection((host, int(port)), timeout=1).close()
                store = _store(address, _OWN)
                if store.check([_OPEN]):
                    return store
                deadline = time.monotonic() + wait_s
                if not has_warned:
                    has_warned = True
                    log.warning(
                        "This rank's script has ended; its report waits for rank 0's. An interrupt "
                        "shows it alone."
                    )
            time.sleep(_POLL_S)
    return None


def _store(address: str, prefix: str, is_master: bool = False) -> Store:
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


# How long rank 0 waits for the reports of other ranks once its own script has ended.
WAIT_S = 30.0
_REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``explain``."""
    add_output_arguments(parser)
    parser.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help="compile with this backend (dynamo_dist) where the script names none; "
        "left out, the script runs as it is",
    )
    parser.add_argument("--schema", action=_PrintSchema, help="print the JSON schema of --json")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="a Python file that calls torch.compile")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")


class _PrintSchema(argparse.Action):
    """Like ``--help``: prints and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)

    def __call__(self, parser: argparse.ArgumentParser, *rest: object) -> None:
        print(json.dumps(json_schema(), indent=2))
        parser.exit()


def run(arguments: argparse.Namespace) -> int:
    """Run the script and report; the script's exit status, or 2 if it cannot be started."""
    if why := _refusal(arguments):
        fail(arguments, why)
        return _REFUSED
    with tempfile.TemporaryDirectory(prefix="dynamo_dist_explain_") as folder:
        script = ["-m", arguments.script] if arguments.is_module else [arguments.script]
        environ = {
            **os.environ,
            explained_process.FOLDER: folder,
            explained_process.BACKEND: arguments.backend,
        }
        command = [*interpreter(), *script, *arguments.arguments]
        with running(command, environ, quiet=arguments.json) as wait:
            status = wait()
            try:
                _report(arguments, folder, status)
            except Exception as error:  # the script's status counts, whatever becomes of its report
                fail(arguments, f"there is no report: {type(error).__name__}: {error}")
    return end_like(status)


def _refusal(arguments: argparse.Namespace) -> str:
    if not arguments.is_module and not Path(arguments.script).is_file():
        return f"There is no script {arguments.script!r}."
    installed = importlib.metadata.entry_points(group="torch.backends", name="dynamo_dist")
    if not installed:
        return (
            "dynamo-dist is not installed, so that torch does not call it in the script's "
            "processes. Install it: pip install -e . in a checkout."
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return (
            "TORCH_DEVICE_BACKEND_AUTOLOAD is off, so that torch calls no extension in the "
            "script's processes. Unset it."
        )
    return ""


def _report(arguments: argparse.Namespace, folder: str, status: int) -> None:
    """Show the report of all ranks that are known here; other ranks than 0 hand theirs to rank
    0.
    """
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    found = explained_process.read(folder, (rank, world_size)) or [RunReport(rank, world_size)]
    ended = Fact("exit status", _status_text(status), "", "the script's")
    found = [dataclasses.replace(report, facts=(ended, *report.facts)) for report in found]
    others = sorted(set(range(found[0].world_size)) - {report.rank for report in found})
    is_host = found[0].rank == 0
    store = agent_store() if world_size > 1 else None
    if store is None and others:
        # A script that ended before it met anyone leaves what the launcher said.
        given = given_address() if world_size > 1 else ""
        if address := explained_process.meeting(folder) or given:
            store = own_store(address, is_host, WAIT_S)
    if store is not None and not is_host:
        for report in found:
            give(store, report)
        return
    if store is not None:
        found += take(store, others, WAIT_S)
    show(arguments, merge_ranks(found), "" if is_host else f".rank{found[0].rank}")


def _status_text(status: int) -> str:
    return str(status) if status >= 0 else f"killed by {signal.Signals(-status).name}"
