"""Output of NCCL-tests (``all_reduce_perf`` ...; rccl-tests print the same) -> measurements.

Columns are found by the names in the table's head, which differ between versions. The time out of place
is taken, as compiled code calls collectives. The first column counts what the benchmark calls the size:
of an all-gather and a gather that is the gathered bytes, of all others one rank's input.
"""

from __future__ import annotations

import re

from inductor_passes.cost.measurements import Measurements, medians
from inductor_passes.errors import TopologyError
from inductor_passes.files import MOST, shown

# Name of the benchmark -> our kind, and whether its size counts what all ranks give together.
BENCHMARKS = {
    "all_reduce": ("all_reduce", False),
    "all_gather": ("all_gather", True),
    "reduce_scatter": ("reduce_scatter", False),
    "alltoall": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "reduce": ("reduce", False),
    "gather": ("gather", True),
    "scatter": ("scatter", False),
    "sendrecv": ("permute", False),
}
_STARTING = re.compile(r"Collective test starting: (\w+?)_perf")
_BENCHMARK = re.compile(r"\b(" + "|".join(BENCHMARKS) + r")_perf")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*\bon\s+(\S+)\s+device\b")
_MOST_CHARACTERS = 8 << 20
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+")


def parse(
    text: str,
    file: str,
    *,
    kind: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
) -> Measurements:
    """Read one output, of one benchmark on one set of ranks.

    ``kind`` is a benchmark's name without ``_perf``; without it the output must name it, as versions from
    2.18 do, or the file's name. ``ranks`` and ``nodes`` override what the output says. Raises
    TopologyError where one of them is not to be found, or a row cannot be read.
    """
    if len(text) > _MOST_CHARACTERS:
        raise TopologyError(
            f"{file!r} has more than {_MOST_CHARACTERS >> 20} million characters.",
            "What one benchmark prints has some thousands.",
            "Give its output alone.",
        )
    kind = kind or _benchmark(text, file)
    if kind not in BENCHMARKS:
        raise TopologyError(
            f"{file!r} does not say which benchmark it is of.",
            "Sizes mean different things in different ones.",
            f"Give it with --kind: {', '.join(BENCHMARKS)}.",
        )
    found = filter(None, map(_RANK.match, text.splitlines()))
    hosts = {match[1]: match[2] for match in found}
    ranks = ranks or len(hosts)
    nodes = nodes or len(set(hosts.values()))
    if not 1 <= nodes <= ranks:
        raise TopologyError(
            f"{file!r} does not say on how many ranks it ran.",
            "It has no lines of the form '# Rank 0 ... on HOST device 0'.",
            "Give them with --ranks and --nodes.",
        )
    name, gathered = BENCHMARKS[kind]
    share = ranks if gathered else 1
    rows = [(size // share, us) for size, us in _rows(text, file)]
    if not rows:
        raise TopologyError(
            f"{file!r} has no row of times.",
            "Expected is what NCCL-tests print: a head with 'size' and 'time', and rows below it.",
            "Give the whole output.",
        )
    return Measurements(
        source=f"NCCL-tests, {kind} on {ranks} ranks of {nodes} nodes, {file}",
        collectives={(name, ranks, nodes): medians(rows)},
    )


def _benchmark(text: str, file: str) -> str:
    for pattern, where in ((_STARTING, text), (_BENCHMARK, file), (_BENCHMARK, text)):
        names = set(pattern.findall(where))
        if len(names) == 1:
            return str(names.pop())
    return ""


def _rows(text: str, file: str) -> list[tuple[int, float]]:
    rows: list[tuple[int, float]] = []
    time = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().lstrip("#").split()
        if words[:2] == ["size", "count"] and "time" in words:
            time = words.index("time")
        elif "(elements)" in words and "(us)" not in words:
            raise TopologyError(
                f"{file!r}, line {number}: times are not in microseconds.", fix="Measure in those."
            )
        elif time is not None and _ROW.match(line):
            try:
                rows.append((int(words[0]), us := float(words[time])))
                if not us <= MOST or rows[-1][0] > MOST:
                    raise ValueError
            except (ValueError, IndexError):
                raise TopologyError(
                    f"{file!r}, line {number}: {shown(line.strip())} has no time in column {time + 1}.",
                    fix="Give the output as it was printed.",
                ) from None
    return [(size, us) for size, us in rows if size and us > 0]
