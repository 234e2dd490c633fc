"""``python -m inductor_passes costs formula SCRIPT``: what a step takes, as a formula in ranks and sizes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import sympy
from torch import fx

from inductor_passes import registry
from inductor_passes.base import GraphPass, PassStats
from inductor_passes.cli.fake_rank import run_script
from inductor_passes.errors import OptionError, PassesError
from inductor_passes.machine.formula import RANKS, GraphCosts, StepFormula, StepTimes
from inductor_passes.machine.topology.topology import Topology, load_topology

DIGITS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("--world-size", type=int, default=8, metavar="N", help="ranks to trace on")
    parser.add_argument("--topology", default="h100x8", help="a name or a JSON file")
    parser.add_argument(
        "--ranks",
        type=_numbers,
        default=[8, 64, 512, 4096],
        metavar="N,...",
        help="sizes of the group to predict for; default 8,64,512,4096",
    )
    parser.add_argument(
        "--group",
        type=_numbers,
        action="append",
        default=[],
        metavar="RANK,...",
        help="global ranks of a group that grows, such as 0,8,16; the largest if left out. Of several, the "
        "first has n ranks, the others as many for each of these as they had",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SYMBOL=SIZE",
        help="a size to predict for; as traced if left out",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("script", help="a Python file that calls init_process_group and compiles")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")


def run(arguments: argparse.Namespace) -> int:
    """0: printed. 1: there is no formula, one line says why. 2: the script or command line is at fault."""
    try:
        topology = load_topology(arguments.topology)
        sizes = dict(_assignment(text) for text in arguments.set)
    except PassesError as error:
        return _failed(str(error), 2)
    if not Path(arguments.script).is_file():
        return _failed(f"There is no script {arguments.script!r}.", 2)
    collector = _Collector(topology)
    registry.register(collector, before=registry.registered_passes()[0])
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what the script prints is not our answer
            error_ = run_script(
                arguments.script, arguments.arguments, 0, arguments.world_size, dynamic=True
            )
    finally:
        registry.unregister(collector)
    if error_:
        return _failed(f"The script failed: {error_}", 2)
    if not collector.graphs:
        return _failed("The script compiled no graph with these passes.", 1)
    try:
        formula = StepFormula.of(collector.graphs, topology, arguments.group)
        grows = RANKS.name in formula.traced
        points = [{RANKS.name: count} for count in arguments.ranks] if grows else [{}]
        predicted = [(point, formula.at(**{**sizes, **point})) for point in points]
    except PassesError as error:
        return _failed(str(error), 2)
    write = _json if arguments.json else _text
    print(write(formula, predicted, topology, len(collector.graphs)))
    return 0


class _Collector(GraphPass):
    """Reads each graph before any pass changes it, and changes nothing."""

    name: ClassVar[str] = "costs_formula"
    needs_collectives: ClassVar[bool] = False

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.graphs: list[GraphCosts] = []

    def run(self, graph: fx.Graph) -> PassStats:
        self.graphs.append(GraphCosts.of(graph, self.topology))
        return PassStats(False)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _assignment(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not size.isdigit():
        raise OptionError(f"--set {text} is not SYMBOL=SIZE.", "", "Write for example --set s0=16.")
    return name, int(size)


def _json(
    formula: StepFormula,
    predicted: Sequence[tuple[dict[str, int], StepTimes]],
    topology: Topology,
    graphs: int,
) -> str:
    result: dict[str, Any] = {
        "topology": topology.name,
        "graphs": graphs,
        "symbols": {
            name: {"traced": size, "source": formula.sources.get(name, "")}
            for name, size in formula.traced.items()
        },
        "terms": [
            {"where": t.where, "what": t.what, "count": t.count, "us": str(t.us)}
            for t in formula.terms
        ],
        "predicted": [
            {
                "sizes": point,
                "compute_us": p.compute_us,
                "link_us": dict(p.link_us),
                "at_least_us": p.at_least_us,
                "at_most_us": p.at_most_us,
            }
            for point, p in predicted
        ],
    }
    return json.dumps(result, indent=2)


def _text(
    formula: StepFormula,
    predicted: Sequence[tuple[dict[str, int], StepTimes]],
    topology: Topology,
    graphs: int,
) -> str:
    lines = [f"time of {graphs} graph{'s' * (graphs > 1)} on {topology.name}, in microseconds"]
    for name, size in formula.traced.items():
        lines.append(f"  {name} = {formula.sources.get(name, '')}, traced with {size}")
    where = ""
    for term in formula.terms:
        if term.where != where:
            where = term.where
            lines.append(where if where == "compute" else f"link of ranks {where}")
        lines.append(f"  {term.count} x {term.what}: {sympy.N(term.us, DIGITS)}")
    lines.append(
        "step, in milliseconds: with all hidden that can be and no launch merged, and with nothing hidden"
    )
    for point, p in predicted:
        at = ", ".join(f"{name} = {size}" for name, size in point.items()) or "as traced"
        lines.append(
            f"  {at}: {p.at_least_us / 1e3:.3f} to {p.at_most_us / 1e3:.3f} (compute "
            f"{p.compute_us / 1e3:.3f}, "
            f"links {', '.join(f'{us / 1e3:.3f}' for us in p.link_us.values()) or 'none'})"
        )
    return "\n".join(lines)


def _failed(why: str, status: int) -> int:
    print(f"error: {why}", file=sys.stderr)
    return status
