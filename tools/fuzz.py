"""Random distributed programs: eager mode against compiled, on all ranks, with every pass.

    python tools/fuzz.py --seed 0 --minutes 30  # as many as fit, failures go to fuzz_failures/
    python tools/fuzz.py --seed 0 --programs 200 --json
    python tools/fuzz.py --seed 136 --programs 1 --kind graph

A program is drawn from its number alone. Programs of functional collectives are traced and run
before and after sets of passes; programs of c10d calls, DTensors and modules run on ranks that are
threads, in eager mode, compiled, and on one device. A program that eager mode refuses is thrown
away, and counted. A failing one is cut down and written to a file. Exits with 1 if there is any.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import itertools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from fuzzing import runs
from workers import run

FAILED = ("mismatch", "crash", "hang", "break")
_FOUND = ("mismatches", "crashes", "hangs", "graph_breaks")
_SUMMED = ("programs", "as_inductor_code", "refused", *_FOUND)


def main(argv: list[str] | None = None) -> int:
    """Run programs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--programs", type=int, help="at most so many")
    parser.add_argument("--kind", choices=("graph", "c10d", "dtensor", "module"))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one program")
    parser.add_argument("--failures", type=Path, default=Path("fuzz_failures"))
    parser.add_argument("--stop", type=int, help="end after so many failures")
    parser.add_argument("--shrink", type=float, default=30.0, help="seconds to cut a failure down")
    parser.add_argument("--plant", help="module:function, called first: a fault to be found")
    parser.add_argument("--out", type=Path, help="add the result to this file of runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    start, commit = time.monotonic(), runs.commit()
    counts: collections.Counter[str] = collections.Counter()
    kinds: collections.Counter[str] = collections.Counter()
    as_code = 0
    failures: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    arguments = (options.kind, str(options.failures), options.shrink, options.plant)
    for seed, record in run(
        _seeds(options, start, failures),
        _programs,
        arguments,
        options.jobs,
        options.timeout,
        lives=400,
    ):
        if isinstance(record, str):
            status = "hang" if record == "timeout" else record
            record = {"kind": options.kind or "?", "status": status, "why": "process died or hung"}
        counts[record["status"]] += 1
        kinds[record["kind"]] += 1
        as_code += record.get("code", False)
        if record["status"] in FAILED:
            failures.append({"program": seed, **record})
            if not options.json:
                print(f"program {seed}: {record}", file=sys.stderr)
        result = {
            "torch": torch.__version__,
            "commit": commit,
            "seed": options.seed,
            "programs": sum(counts.values()),
            "by_kind": dict(sorted(kinds.items())),
            "as_inductor_code": as_code,
            "refused": counts["refused"],
            "mismatches": counts["mismatch"],
            "crashes": counts["crash"],
            "hangs": counts["hang"],
            "graph_breaks": counts["break"],
            "seconds": round(time.monotonic() - start, 1),
        }
        if options.out:  # each time: a long run may be ended from outside
            _add(result, options.out)
    print(json.dumps({**result, "failures": failures}) if options.json else result)
    return 1 if failures else 0


def _add(run: runs.Run, path: Path) -> None:
    """Put a run into the file, in place of one of the same seed and commit."""
    runs.add(run, path, lambda of: (of["seed"], of["commit"]), _SUMMED)


def _seeds(options: argparse.Namespace, start: float, failures: list[Any]) -> Iterator[int]:
    for seed in itertools.count(options.seed):
        spent = time.monotonic() - start
        enough = options.programs is not None and seed >= options.seed + options.programs
        if enough or spent > 60 * options.minutes or len(failures) >= (options.stop or 1_000_000):
            return
        yield seed


def _programs(
    kind: str | None, failures: str, shrink_s: float, plant: str | None
) -> Callable[[int], dict[str, Any]]:
    """What a process does with the number of a program."""
    logging.disable(logging.CRITICAL)  # torch logs what eager mode refuses
    from fuzzing import kinds, reproducer
    from fuzzing.execute import prepare
    from fuzzing.shrink import shrink

    if plant:
        module, _, function = plant.partition(":")
        getattr(importlib.import_module(module), function)()

    prepare()

    def do(seed: int) -> dict[str, Any]:
        program = kinds.draw(seed, kind)
        verdict = kinds.run(program)
        record = {"kind": program.kind, "status": verdict.status}
        record["code"] = bool(program.settings.get("code"))
        if verdict.found:
            smaller = shrink(program, kinds.run, verdict.status, shrink_s)
            path = reproducer.write(smaller, verdict, Path(failures))
            record |= {"why": verdict.why.strip()[:300], "file": str(path)}
        return record

    return do


if __name__ == "__main__":
    sys.exit(main())
