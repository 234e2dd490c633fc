"""Random programs of ranks that are unlike each other, compiled, beside eager mode, on real gloo
ranks.

    python tools/fuzz_ranks.py --programs 500 --ranks 2,4,2x2 --seed 0 --json FILE
    python tools/fuzz_ranks.py --seed 136 --programs 1 --show
    python tools/fuzz_ranks.py --seed 5041 --programs 1 --upstream # does upstream run what failed?

Ranks launch matching sequences in eager mode, whatever they hold: batches of other lengths, a print
on one of them, functions that one alone compiles, other caches. Models train with DDP or FSDP2,
with micro-batches and evaluation between, some in eager mode. Each program is drawn from its number
alone. The passes, Inductor's lowering and its generated modules run; kernels are Python, so that no
program needs a compiler. Exits with 1 if a program fails. A file given by ``--json`` holds all runs
and their sums, and under ``open`` the programs that have failed and not run well since.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from inductor_passes.pass_options import COMPILES

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from fuzzing import runs
from fuzzing.unlike.draw import draw
from fuzzing.unlike.job import OPTIONS
from fuzzing.unlike.pool import Pool
from fuzzing.unlike.program import Event, Program
from fuzzing.unlike.verdict import CLASSES, FAULTS, Verdict, judge

_USUAL = (("compile", "folder"), ("split", "off"), ("backend", "dynamo_dist"))
_DID = ("scheduled", "reordered", "cut")
_SUMMED = ("programs", "scheduled", "reordered", "seconds", *CLASSES)


def main(argv: list[str] | None = None) -> int:
    """Run programs; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--ranks", default="2,4,2x2", help="meshes to draw from")
    parser.add_argument(
        "--timeout",
        type=float,
        default=60.0,
        help="seconds without any work in which a program hangs",
    )
    parser.add_argument("--minutes", type=float, help="start no program after so many")
    parser.add_argument(
        "--compile",
        choices=COMPILES,
        default="folder",
        help="who compiles graphs that are the same",
    )
    parser.add_argument(
        "--split", default="off", help="'auto', or in how many parts graphs are cut"
    )
    parser.add_argument(
        "--upstream", action="store_true", help="upstream's own backend, to compare with"
    )
    parser.add_argument("--failures", type=Path, default=Path("fuzz_failures"))
    parser.add_argument("--show", action="store_true", help="print each program before it runs")
    parser.add_argument("--json", type=Path, help="add the result to this file of runs")
    options = parser.parse_args(argv)

    meshes = tuple(
        tuple(int(size) for size in text.split("x")) for text in options.ranks.split(",")
    )
    seeds = range(options.seed, options.seed + options.programs)
    widest = max(draw(seed, meshes).ranks for seed in seeds)
    of_all: dict[str, Any] = {"backend": "inductor"}
    if not options.upstream:
        split = int(options.split) if options.split.isdigit() else options.split
        of_all = {"compile": options.compile, "split": split}
    # Ranks are processes that are started below.
    os.environ[OPTIONS] = json.dumps(None if options.upstream else of_all)
    counts: collections.Counter[str] = collections.Counter()
    failed: list[dict[str, Any]] = []
    start, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    result: dict[str, Any] = {}
    with Pool(widest, options.timeout) as pool:
        for seed in seeds:
            if options.minutes and time.monotonic() - start > 60 * options.minutes:
                break
            program = draw(seed, meshes)
            if options.show:
                print(show(program))
            began = time.monotonic()
            verdict = judge(program, pool.run(seed, meshes))
            counts.update({verdict.word: 1, "programs": 1})
            did = {name: getattr(verdict, name) for name in _DID}
            counts.update(did)
            first = " ".join(verdict.why.split("\n")[:4])[:500]
            took = time.monotonic() - began
            how = ", ".join(name for name in _DID[1:] if did[name]) or "as written"
            print(
                f"{seed} {verdict.word} {took:.1f} s, {how} {list(program.notes)} {first}",
                flush=True,
            )
            if verdict.word in (*FAULTS, "refused"):
                failed.append({"program": seed, "class": verdict.word, "why": first})
                _write(program, verdict, pool.log(), options.failures)
            result = {
                "torch": torch.__version__,
                "commit": runs.commit(),
                "at": started,
                "seed": options.seed,
                "ranks": options.ranks,
                **of_all,
                "programs": counts["programs"],
                **{word: counts[word] for word in (*CLASSES, *_DID)},
                "seconds": round(time.monotonic() - start, 1),
                "failed": failed,
            }
            if options.json:  # each time: a long run may be ended from outside
                _add(result, options.json)
    print(json.dumps({key: value for key, value in result.items() if key != "failed"}))
    return 1 if any(counts[word] for word in FAULTS) else 0


def show(program: Program) -> str:
    """The program in words and source."""
    text = [f"program {program.seed}, mesh {program.mesh}, {list(program.notes)}"]
    text += [f"dynamic {program.dynamic}, caches {program.caches}, warm {program.warm}"]
    text += [f"late {program.late}, options {program.options}", program.source]
    for rank, steps in enumerate(program.events):
        text.append(f"rank {rank}")
        text += [
            f"  {at}: {', '.join(_words(each) for each in step)}" for at, step in enumerate(steps)
        ]
    return "\n".join(text)


def _words(event: Event) -> str:
    text = f"{event.what} {event.name} {event.rows or ''}{chr(33) * event.loud}"
    return " ".join([text, *event.how, *(["other head"] if event.head else [])])


def _write(program: Program, verdict: Verdict, log: str, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ranks_{program.seed}.txt"
    path.write_text(f"{verdict.word}: {verdict.why}\n\n{show(program)}\n\n{log}\n")


def _add(run: runs.Run, path: Path) -> None:
    """Put a run into the file, in place of one of the same seed, commit, ranks and options."""

    def key(of: runs.Run) -> tuple[Any, ...]:
        return of["seed"], of["commit"], of["ranks"], *(of.get(*each) for each in _USUAL)

    runs.add(run, path, key, _SUMMED, open=lambda all_runs: sorted(_open(all_runs)))


def _open(of: list[runs.Run]) -> set[int]:
    """The programs that failed and have not run well in a later run."""

    def runs_well(program: int, run: runs.Run) -> bool:
        drawn = range(run["seed"], run["seed"] + run["programs"])
        return program in drawn and all(each["program"] != program for each in run["failed"])

    return {
        each["program"]
        for run in of
        for each in run["failed"]
        if each["class"] in FAULTS
        and not any(
            other["ranks"] == run["ranks"]
            and other.get("at", "") > run.get("at", "")
            and runs_well(each["program"], other)
            for other in of
        )
    }


if __name__ == "__main__":
    sys.exit(main())
