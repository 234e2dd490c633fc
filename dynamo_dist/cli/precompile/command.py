"""The command: each rank in a process of its own, some at once; what they saved, or why one could not.

``--json`` prints one object: ``{"path": str, "ranks": [{"rank", "seconds", "graphs", "entries", "bytes"}]}``, or
``{"path", "ranks", "error": why}``. The exit status is 0, 1 where a rank failed, 2 where nothing could be started.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dynamo_dist.cli.precompile.rank import Task
from inductor_passes.cli.verify_ranks.command import listed_ranks

_REFUSED = 2
_LAST_LINES = 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``precompile``."""
    parser.add_argument("--world-size", type=int, required=True, metavar="N")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="what load() is to be given")
    parser.add_argument(
        "--ranks", default="", help="ranks to compile for, such as 0,1,7; left out, all"
    )
    parser.add_argument(
        "--ranks-per-node", type=int, default=0, metavar="N", help="left out, all are on one node"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="ranks at once")
    parser.add_argument(
        "--steps",
        type=int,
        default=2,
        metavar="N",
        help="end the script after so many steps of an optimizer (2); 0: where it calls save(), or ends",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="the job's script, which calls init_process_group")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")


class _Failed(Exception):
    """A rank that saved nothing; the text says why."""


def run(arguments: argparse.Namespace) -> int:
    """Compile for each rank; the exit status."""
    made: list[dict[str, Any]] = []
    try:
        ranks = chosen_ranks(arguments.world_size, arguments.ranks, arguments.ranks_per_node)
        if not arguments.is_module and not Path(arguments.script).is_file():
            raise ValueError(f"There is no script {arguments.script!r}.")
    except ValueError as error:
        return _end(arguments, made, str(error), _REFUSED)
    console = Console(stderr=True, quiet=arguments.json)
    try:
        with tempfile.TemporaryDirectory(prefix="dynamo_dist_precompile_") as folder:
            tasks = [_task(arguments, rank, folder) for rank in ranks]
            for saved in _with_progress(_all(tasks, arguments.jobs), len(tasks), console):
                made.append(saved)
    except _Failed as error:
        return _end(arguments, made, str(error), 1)
    return _end(arguments, made, "", 0)


def chosen_ranks(world_size: int, ranks: str, ranks_per_node: int) -> list[int]:
    """Ranks that ``--ranks`` names, or all. Raises ValueError, one line, for what does not fit."""
    if world_size < 1:
        raise ValueError(f"--world-size {world_size} is less than 1.")
    if ranks_per_node < 0 or (ranks_per_node and world_size % ranks_per_node):
        raise ValueError(
            f"--ranks-per-node {ranks_per_node} does not divide --world-size {world_size}."
        )
    return listed_ranks(world_size, ranks) if ranks else list(range(world_size))


def _task(arguments: argparse.Namespace, rank: int, folder: str) -> Task:
    return Task(
        script=arguments.script,
        arguments=tuple(arguments.arguments),
        is_module=arguments.is_module,
        rank=rank,
        world_size=arguments.world_size,
        ranks_per_node=arguments.ranks_per_node or arguments.world_size,
        steps=arguments.steps,
        path=os.path.abspath(arguments.out),
        said=os.path.join(folder, f"{rank}.json"),
    )


def _all(tasks: Sequence[Task], at_once: int) -> Iterator[dict[str, Any]]:
    """What each rank saved, as they end. Raises _Failed at the first that did not; the others are stopped then."""
    running: list[subprocess.Popen[bytes]] = []
    with futures.ThreadPoolExecutor(max(1, at_once)) as pool:
        waiting = [pool.submit(_one, task, running) for task in tasks]
        try:
            for done in futures.as_completed(waiting):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()


def _one(task: Task, running: list[subprocess.Popen[bytes]]) -> dict[str, Any]:
    command = [sys.executable, "-m", "dynamo_dist.cli.precompile.rank"]
    started = time.monotonic()
    log = Path(task.said).with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, json.dumps(dataclasses.asdict(task))],
            env={**os.environ, **task.environment()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    running.append(process)
    if status := process.wait():
        last = log.read_text(errors="replace").strip().splitlines()[-_LAST_LINES:]
        raise _Failed(
            f"Rank {task.rank} of {task.world_size} saved nothing: its script ended with {status}.\n"
            + "\n".join(f"  {line}" for line in last)
        )
    try:
        saved = json.loads(Path(task.said).read_text())
    except FileNotFoundError:
        raise _Failed(
            f"Rank {task.rank} of {task.world_size} saved nothing: its script ended its process by itself, as os._exit "
            "does. Have it call dynamo_dist.save() once it has compiled."
        ) from None
    saved.pop("path")
    return {"rank": task.rank, "seconds": round(time.monotonic() - started, 1), **saved}


def _with_progress(
    made: Iterator[dict[str, Any]], total: int, console: Console
) -> Iterator[dict[str, Any]]:
    columns = (TextColumn("ranks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, contextlib.closing(made):  # type: ignore[type-var]
        bar = progress.add_task("", total=total)
        for saved in made:
            progress.advance(bar)
            progress.console.print(
                f"rank {saved['rank']}: {saved['graphs']} compiled graphs, "
                f"{saved['bytes'] / 2**20:.1f} MiB, {saved['seconds']:.0f} s"
            )
            yield saved


def _end(arguments: argparse.Namespace, made: list[dict[str, Any]], error: str, status: int) -> int:
    path = os.path.abspath(arguments.out)
    if arguments.json:
        found = {"path": path, "ranks": sorted(made, key=lambda each: each["rank"])}
        print(json.dumps({**found, "error": error} if error else found))
    elif error:
        print(f"error: {error}", file=sys.stderr)
    else:
        print(f'dynamo_dist.load("{path}") starts {len(made)} ranks from it.')
    return status
