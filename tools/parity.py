#!/usr/bin/env python
"""Run programs with upstream torch and with the plugin, in processes of their own: none may end
worse.

    python tools/parity.py                       # everything that has no result for this commit yet
    python tools/parity.py --quick               # the part for CI, three to four minutes on 2 cores
    python tools/parity.py --part operators --only cond --fresh
    python tools/parity.py --part graphs --part strategies --pages   # write their pages in docs/
    python tools/parity.py --list

The parts are corpus (test/corpus, its own referee), lowering (the same through Inductor's lowering
and code generation, whose graphs are then interpreted), operators (higher-order ones), strategies
(torch's operators on DTensors), features (torch without distribution), dtensors (DTensor programs
on all ranks), graphs (DTensor programs that ought to be one graph) and models (transformers' with a
tensor-parallel plan); those on real ranks end in "-ranks", and graphs are. A program that hangs or
ends its process counts as lost, and the run goes on. Exits with 1 if upstream is right where ours
is not, or if ours is wrong anywhere.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from comparison import pages, ranks
from comparison.keeping import Kept, add_figures
from comparison.outcome import BAD, End, Verdict, judge
from comparison.part import SIDES, Part, working
from comparison.parts import PARTS
from comparison.table import figures, show
from workers import run

NO_ANSWER = ("hang", "crash")
CHANCES = 2


def main(argv: list[str] | None = None) -> int:
    """Run programs on both sides; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="may be repeated")
    parser.add_argument("--only", default="", metavar="REGEX", help="programs by name")
    parser.add_argument("--quick", action="store_true", help="a sample of every part")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, help="instead of the part's: longer is lost")
    parser.add_argument("--results", type=Path, help="folder of records, to resume and to add up")
    parser.add_argument("--fresh", action="store_true", help="run again what has a record")
    parser.add_argument("--figures", type=Path, help="put the counts of parts into this file")
    parser.add_argument(
        "--pages", action="store_true", help="write the pages of graphs and strategies"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plant", help="a module with programs of its own, as the only part")
    parser.add_argument("--list", action="store_true", help="the names of the programs, and end")
    options = parser.parse_args(argv)

    start = time.monotonic()
    if options.plant:
        PARTS["planted"] = Part("planted", options.plant, "planted programs")
        options.part = ["planted"]
    parts = [PARTS[name] for name in options.part or PARTS]
    chosen = {
        part.name: [
            name
            for name in (part.quick if options.quick else part.names())
            if re.search(options.only, name)
        ]
        for part in parts
    }
    if options.list:
        for part, names in chosen.items():
            print("\n".join(f"{part}: {name}" for name in names))
        return 0
    if options.pages and options.only and "strategies" in chosen:
        parser.error("the page of strategies has all operators: leave out --only")
    kept = Kept(options.results)
    found = {}
    for part, names in chosen.items():
        ends = {side: _side(PARTS[part], names, side, kept, options) for side in SIDES}
        found[part] = _verdicts(PARTS[part], ends)
        if options.pages:
            pages.write(part, ends)
    result = figures(found, kept.commit, round(time.monotonic() - start, 1))
    if options.figures:
        add_figures(options.figures, result)
    if options.json:
        print(json.dumps(result))
    else:
        show(found, result)
    return 1 if any(v.name in BAD for part in found.values() for v in part.values()) else 0


def _verdicts(part: Part, ends: dict[str, dict[str, End]]) -> dict[str, Verdict]:
    return {
        name: judge(ends["upstream"][name], ours, part.theirs, part.explained)
        for name, ours in ends["ours"].items()
    }


def _side(
    part: Part, names: list[str], side: str, kept: Kept, options: argparse.Namespace
) -> dict[str, End]:
    """How each program ends on one side. One that gave no answer gets a second chance: a busy
    machine is no fault.
    """
    known: dict[str, End] = {} if options.fresh else kept.read(part.name, side)
    missing = [name for name in names if name not in known]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        label = f"{part.name}, {side}"
        task = progress.add_task(label, total=len(names), completed=len(names) - len(missing))
        for chance in range(CHANCES):
            seconds = options.seconds or part.seconds
            if part.on_ranks:
                ends = ranks.run(part, missing, side, seconds)
            else:
                records = run(
                    missing,
                    working,
                    (part, side),
                    options.jobs,
                    seconds,
                    lambda name: progress.update(task, description=f"{label}: {name[:40]}"),
                    lives=part.lives,
                )
                ends = ((name, _end(record)) for name, record in records)
            for name, end in ends:
                known[name] = end
                if end.status not in NO_ANSWER or chance + 1 == CHANCES:
                    kept.add(part.name, side, name, end)
                    progress.advance(task)
            missing = [name for name in missing if known[name].status in NO_ANSWER]
    return {name: known[name] for name in names}


def _end(record: dict[str, Any] | str) -> End:
    if isinstance(record, str):
        status = "hang" if record == "timeout" else "crash"
        return End(status, "no answer in time" if status == "hang" else "the process died")
    return End.from_json(record)


if __name__ == "__main__":
    sys.exit(main())
