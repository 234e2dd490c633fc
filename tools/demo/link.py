"""Two ranks as two hosts: network namespaces, joined by a veth pair that is held to a rate.

The processes are real and so is every byte; the link is emulated by the kernel (``tc tbf``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import data
import launch
import training
from figures import quartiles, ratios, slowest
from rich.table import Table
from show import wide_console

HERE = Path(__file__).resolve().parent
LABEL = "real processes, emulated link"
ADDRESSES = ("10.9.0.1", "10.9.0.2")
CHAIN_RANKS = 2
PORT = 29555  # in a namespace of its own, so always free
TITLES = {
    "compute": "compute alone, no link",
    "communication": "communication alone",
    "both": "both at once, independent",
    "upstream": "upstream Inductor, default",
    "upstream_reorder": "upstream Inductor, its opt-in reordering",
    "ours": "dynamo_dist",
}


class CannotEmulate(Exception):
    """This machine cannot make such a link; ``str()`` says what is missing."""


@dataclass(frozen=True)
class Host:
    """One end of the link."""

    namespace: str
    interface: str
    address: str


def run(args: argparse.Namespace) -> int:
    """Time a chain of gathers on the link, or train on it; exit code 2 if it cannot be made."""
    try:
        with two_hosts(args.link) as hosts:
            print(f"two hosts, link {args.link} ({LABEL}) ...", file=sys.stderr, flush=True)

            def start(script: Path, arguments: list[str], work: Path, ranks: int) -> None:
                command = [str(script), "--work", str(work), *arguments]
                run_ranks(hosts, command, work, args.deadline, ranks // len(hosts))

            if args.train:
                return training.run(args, start, f"{LABEL}, {args.link}")
            return run_chain(args, start)
    except CannotEmulate as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run_ranks(
    hosts: Sequence[Host], command: list[str], work: Path, deadline_s: float, per_host: int
) -> None:
    """So many ranks on each host, joined by the link."""
    commands, variables = [], []
    for rank in range(per_host * len(hosts)):
        host = hosts[rank // per_host]
        commands.append(["ip", "netns", "exec", host.namespace, sys.executable, *command])
        variables.append(
            {
                **data.environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_host),
                "WORLD_SIZE": str(per_host * len(hosts)),
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "GLOO_SOCKET_IFNAME": host.interface,
            }
        )
    launch.watch(commands, variables, work, deadline_s)


def run_chain(args: argparse.Namespace, start: training.Launcher) -> int:
    """Time the variants in turn and show the ratio; 0 if their numbers are equal."""
    work = Path(tempfile.mkdtemp(prefix="dynamo_dist_link_"))
    try:
        arguments = ["--rounds", str(args.rounds), "--timeout", str(args.timeout)]
        start(HERE / "link_worker.py", arguments, work, CHAIN_RANKS)
        results = summarise(training.rank_files(work, CHAIN_RANKS), args.link)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
    return 0 if results["ok"] else 1


@contextlib.contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Host, Host]]:
    """Two namespaces that reach each other at ``rate`` both ways; gone afterwards.

    Raises CannotEmulate without root, ``ip`` or ``tc``, or where the kernel refuses.
    """
    if not re.fullmatch(r"[0-9.]+(bit|[kmgt]i?bit|bps|[kmgt]i?bps)", rate, re.IGNORECASE):
        raise CannotEmulate(f"--link {rate} is no rate that tc knows; write 1gbit or 200mbit.")
    if sys.platform != "linux" or os.geteuid() != 0:
        raise CannotEmulate(
            "--link needs root on Linux: it makes network namespaces. Run it with sudo, or in a "
            "container that is started with --privileged."
        )
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        raise CannotEmulate(
            f"--link needs {' and '.join(absent)}, which this machine lacks: "
            "apt-get install iproute2"
        )
    tag = f"dd{os.getpid()}"
    hosts = tuple(Host(f"{tag}{end}", f"{tag}{end}", ADDRESSES[i]) for i, end in enumerate("ab"))
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
        a, b = hosts
        _ip("link", "add", a.interface, "type", "veth", "peer", "name", b.interface)
        for host in hosts:
            _ip("link", "set", host.interface, "netns", host.namespace)
            inside = ("-n", host.namespace)
            _ip(*inside, "addr", "add", f"{host.address}/24", "dev", host.interface)
            _ip(*inside, "link", "set", host.interface, "up")
            _ip(*inside, "link", "set", "lo", "up")
            shape = ["tc", *inside, "qdisc", "add", "dev", host.interface, "root", "tbf"]
            _command([*shape, "rate", rate, "burst", "512k", "latency", "200ms"])
        yield a, b
    finally:
        for host in hosts:  # takes its end of the veth pair with it
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        # What is left if the pair never reached its namespace.
        subprocess.run(["ip", "link", "del", hosts[0].interface], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _command(["ip", *arguments])


def _command(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotEmulate(
            f"This machine cannot make the link: '{' '.join(command)}' said: "
            f"{done.stderr.strip() or done.returncode}. In a container, start it with --privileged."
        )


def summarise(ranks: list[dict], rate: str) -> dict:
    """The object that ``--json`` prints. Times are milliseconds of the slower rank in each
    round.
    """
    rounds = {name: slowest([rank["ms"][name] for rank in ranks]) for name in ranks[0]["ms"]}
    ideal = slowest([rounds["compute"], rounds["communication"]])
    to_upstream = ratios(rounds["ours"], rounds["upstream"])
    step_ms = {name: statistics.median(times) for name, times in rounds.items()}
    predicted_ms = ranks[0]["predicted_ms"]
    return {
        "ok": all(rank["equal"] and rank["recompiles"] == 0 for rank in ranks),
        "label": LABEL,
        "link": rate,
        "program": ranks[0]["program"],
        "step_ms": step_ms,
        "step_ms_quartiles": {name: quartiles(times) for name, times in rounds.items()},
        "ratio_ours_to_upstream": statistics.median(to_upstream),
        "ratio_quartiles": quartiles(to_upstream),
        "ratio_ours_to_longer_alone": statistics.median(ratios(rounds["ours"], ideal)),
        "ratio_ours_to_both": statistics.median(ratios(rounds["ours"], rounds["both"])),
        "predicted_ms": predicted_ms,
        "prediction_error": {
            name: predicted_ms[name] / step_ms[name] - 1 for name in ("upstream", "ours")
        },
        "rounds": len(to_upstream),
        "numbers_equal": all(rank["equal"] for rank in ranks),
        "order_kept": all(rank["order_kept"] for rank in ranks),
    }


def show(results: dict) -> None:
    """A table and the ratio."""
    console = wide_console()
    table = Table(title=f"{results['program']}; {results['link']} link ({LABEL})")
    for heading in ("", "step, ms, median", "quartiles", "predicted"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, median in results["step_ms"].items():
        low, high = results["step_ms_quartiles"][name]
        predicted = results["predicted_ms"].get(name)
        cells = f"{median:.1f}", f"{low:.1f} to {high:.1f}", f"{predicted:.1f}" if predicted else ""
        table.add_row(TITLES[name], *cells)
    console.print(table)
    low, high = results["ratio_quartiles"]
    console.print(
        f"ours / upstream: {results['ratio_ours_to_upstream']:.3f} (quartiles {low:.3f} to "
        f"{high:.3f}, {results['rounds']} rounds in turn); results "
        f"{'equal' if results['numbers_equal'] else 'DIFFER'}; launches and waits "
        f"{'stand' if results['order_kept'] else 'DO NOT stand'} in the generated code as scheduled"
    )
    console.print(
        f"ours / the longer of compute and communication alone: "
        f"{results['ratio_ours_to_longer_alone']:.3f}; ours / both at once, where the two share "
        f"these cores: {results['ratio_ours_to_both']:.3f}"
    )
