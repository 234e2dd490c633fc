"""The command: choose ranks, trace each in a process of its own, compare, print."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inductor_passes.cli.verify_ranks.compare import deadlock, differences, ranks_text
from inductor_passes.cli.verify_ranks.trace import Traced, trace_rank

# Up to so many ranks, or indices along a dimension of the mesh, all are traced.
MOST_RANKS = 16
MOST_INDICES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    parser.add_argument("--world-size", type=int, required=True, metavar="N")
    parser.add_argument(
        "--mesh", default="", help="shape of the mesh, such as 4x2; its last dimension is fastest"
    )
    parser.add_argument(
        "--ranks",
        default="",
        help="ranks to trace, such as 0,1,7; chosen from the mesh if left out",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("script", help="a Python file that calls init_process_group and compiles")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")


def run(args: argparse.Namespace) -> int:
    """0: all traced ranks agree. 1: they do not. 2: the script or the command line is at fault."""
    try:
        ranks = chosen_ranks(args.world_size, args.mesh, args.ranks)
    except ValueError as error:
        return _refused(args, str(error))
    if not Path(args.script).is_file():
        return _refused(args, f"There is no script {args.script!r}.")
    traced = [_in_process(args.script, args.arguments, r, args.world_size) for r in ranks]
    result = compare(traced, args.world_size)
    print(json.dumps(result, indent=2) if args.json else _text(result))
    return 2 if result["errors"] else 0 if result["ok"] else 1


def chosen_ranks(world_size: int, mesh: str, ranks: str) -> list[int]:
    """Ranks that stand for all: along each dimension of the mesh the first ones, one amid, the last ones.

    Uneven shards differ at the end of a dimension alone. Raises ValueError, one line, for a mesh or
    rank that does not fit.
    """
    if world_size < 1:
        raise ValueError(f"--world-size {world_size} is less than 1.")
    if ranks:
        return listed_ranks(world_size, ranks)
    shape = [int(size) for size in mesh.split("x")] if mesh else [world_size]
    if math.prod(shape) != world_size:
        raise ValueError(f"--mesh {mesh} has {math.prod(shape)} ranks, --world-size {world_size}.")
    if world_size <= MOST_RANKS:
        return list(range(world_size))
    indices = [
        range(n) if n <= MOST_INDICES else sorted({0, 1, n // 2, n - 2, n - 1}) for n in shape
    ]
    return [
        sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(place))
        for place in itertools.product(*indices)
    ]


def listed_ranks(world_size: int, ranks: str) -> list[int]:
    """Ranks that a text such as ``0,1,7`` names, each once. Raises ValueError, one line, for another text or rank."""
    try:
        chosen = {int(rank) for rank in ranks.split(",")}
    except ValueError:
        raise ValueError(f"--ranks {ranks} is no list of ranks, such as 0,1,7.") from None
    if wrong := [rank for rank in chosen if not 0 <= rank < world_size]:
        raise ValueError(f"--ranks has {wrong[0]}; ranks are 0 to {world_size - 1}.")
    return sorted(chosen)


def compare(traced: Sequence[Traced], world_size: int) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    graphs = dict.fromkeys(graph for item in traced for graph in item.graphs)
    entries, found = [], []
    for graph in graphs:
        launches = {item.rank: item.graphs.get(graph, []) for item in traced}
        parted, cycle = differences(graph, launches), deadlock(launches)
        found += [str(difference) for difference in parted]
        if cycle:
            found.append(f"Graph {graph}: these wait for each other: {', '.join(cycle)}")
        groups = dict.fromkeys(launch.ranks for mine in launches.values() for launch in mine)
        entries.append(
            {
                "graph": graph,
                "launches": {str(rank): len(mine) for rank, mine in launches.items()},
                "groups": [
                    {
                        "ranks": list(group),
                        "equal": all(d.group != group for d in parted),
                        "sequence": [
                            dataclasses.asdict(launch)
                            for launch in next(launches[r] for r in launches if r in group)
                            if launch.ranks == group
                        ],
                    }
                    for group in sorted(groups)
                ],
                "acyclic": not cycle,
            }
        )
    errors = [f"Rank {item.rank}: {item.error}" for item in traced if item.error]
    return {
        "ok": not found and not errors and bool(graphs),
        "world_size": world_size,
        "ranks_traced": [item.rank for item in traced],
        "graphs": entries,
        "differences": found,
        "errors": errors or ([] if graphs else ["The script compiled no graph with a collective."]),
    }


def _in_process(script: str, arguments: Sequence[str], rank: int, world_size: int) -> Traced:
    """Fork, so that torch is imported once and nothing of one rank is left for the next."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(
        target=_send, args=(writer, script, list(arguments), rank, world_size), daemon=False
    )
    child.start()
    writer.close()
    try:
        traced: Traced = reader.recv()
    except EOFError:
        child.join()
        return Traced(rank, error=f"its process died with exit code {child.exitcode}")
    child.join()
    return traced


def _send(writer: Any, script: str, arguments: list[str], rank: int, world_size: int) -> None:
    sys.stdout = sys.stderr  # what the script prints is not our answer
    writer.send(trace_rank(script, arguments, rank, world_size))
    writer.close()


def _text(result: dict[str, Any]) -> str:
    lines = [f"traced {ranks_text(result['ranks_traced'])} of {result['world_size']}"]
    for graph in result["graphs"]:
        groups = graph["groups"]
        equal = sum(group["equal"] for group in groups)
        order = "acyclic" if graph["acyclic"] else "a CYCLE"
        lines.append(
            f"graph {graph['graph']}: {equal} of {len(groups)} groups equal, launch order {order}"
        )
    lines += [*result["differences"], *result["errors"]]
    lines.append("all traced ranks agree" if result["ok"] else "NOT verified")
    return "\n".join(lines)


def _refused(args: argparse.Namespace, why: str) -> int:
    if args.json:
        print(json.dumps({"ok": False, "errors": [why]}))
    else:
        print(f"error: {why}", file=sys.stderr)
    return 2
