#!/usr/bin/env python
"""How long do the corpus's programs take to trace, and their guards to check, with the plugin and without?

    python tools/bench/tracing.py [--repeats 3] [--case SUBSTR] [--every N] [--json] [--write FILE]

Every program of ``test/corpus`` that stock passes (backend ``aot_eager``, a fake group of 8 ranks;
``stock_VERSION.jsonl``) is compiled by both in turn, ``--repeats`` times, in one process. Tracing time is the
CPU time of the first call, Dynamo and AOTAutograd, the smallest of the repeats. Guard time is the CPU
time of one check of all guards of a program with its first inputs, the smallest of some rounds after
each compile; a guard that does not pass there is an error, for it would be quick.
Ratios are of sums over all programs: 1.05 is the most allowed for tracing, 1.0 plus noise for guards.
Absolute times are this machine's; the ratios are the result.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parents[2] / "test" / "corpus"
ROUNDS, CHECKS = 9, 100


def load_corpus() -> Any:
    """The corpus's ``run`` module, which reads its options when it is imported."""
    arguments, sys.argv = sys.argv, ["run.py"]
    sys.path.insert(0, str(CORPUS))
    import run

    sys.argv = arguments
    return run


def passed_by_stock() -> set[str]:
    """Names of the programs that this torch passes without the plugin."""
    import torch

    recorded = CORPUS / f"stock_{torch.__version__.split('+')[0]}.jsonl"
    cases = map(json.loads, recorded.read_text().splitlines())
    return {case["name"] for case in cases if case["status"] == "pass"}


class Guards:
    """The guards of every graph that is compiled while ``watching``, with what they check."""

    def __init__(self) -> None:
        import torch._dynamo.guards as guards

        self.module = guards
        self.profile = guards.profile_guard_manager

    @contextlib.contextmanager
    def watching(self) -> Iterator[list[tuple[Any, Any]]]:
        """Dynamo profiles each guard manager once when it is made: that call tells of it."""
        found: list[tuple[Any, Any]] = []

        def profile(root: Any, scope: Any, count: int) -> float:
            found.append((root, dict(scope)))
            return self.profile(root, scope, count)

        self.module.profile_guard_manager = profile  # type: ignore[assignment]
        try:
            yield found
        finally:
            self.module.profile_guard_manager = self.profile

    def microseconds(self, found: list[tuple[Any, Any]]) -> float:
        """One check of all of them, while the program is compiled."""
        rounds = []
        for _ in range(ROUNDS):
            start = time.process_time_ns()
            passed = [root.check(scope) for root, scope in found for _ in range(CHECKS)]
            rounds.append((time.process_time_ns() - start) / CHECKS / 1e3)
            if not all(passed):
                raise RuntimeError("a guard fails for what was just compiled")
        return min(rounds)


class Bench:
    """Both variants of one program after the other."""

    def __init__(self, run: Any) -> None:
        self.run, self.guards = run, Guards()

    def compile(self, case: dict[str, Any]) -> tuple[float, float]:
        """CPU milliseconds of the first call, and microseconds of the guards."""
        import torch

        options = case["opts"]
        torch.compiler.reset()
        self.run.clear_dtensor()
        setup = self.run.build(case)
        gc.collect()
        patched = (
            torch._dynamo.config.patch(**options["config"])
            if options.get("config")
            else contextlib.nullcontext()
        )
        with patched, self.guards.watching() as found:
            function = self.run.compiled(case, setup, not options.get("nofg"))
            start = time.process_time()
            self.run.go(case, setup, function, setup["args_list"][0])
            spent = (time.process_time() - start) * 1e3
            return spent, self.guards.microseconds(found)

    def measure(self, case: dict[str, Any], repeats: int) -> dict[str, Any] | None:
        """One record; None for a program that not both compile, or that eager fails."""
        import dynamo_dist

        found: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
        for repeat in range(repeats):
            for variant in sorted(found, reverse=repeat % 2 == 0):
                try:
                    with dynamo_dist.enabled() if variant == "ours" else contextlib.nullcontext():
                        found[variant].append(self.compile(case))
                except Exception:
                    return None
        smallest = {
            variant: [round(min(times), 3) for times in zip(*measured, strict=True)]
            for variant, measured in found.items()
        }
        return {
            "name": case["name"],
            "stock_ms": smallest["stock"][0],
            "ours_ms": smallest["ours"][0],
            "stock_guard_us": smallest["stock"][1],
            "ours_guard_us": smallest["ours"][1],
        }


class Progress:
    """What has been measured, kept in a file from program to program so that a run can go on."""

    def __init__(self, path: Path | None, repeats: int) -> None:
        self.path, self.repeats = path, repeats
        self.programs: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        if path and path.exists():
            before = json.loads(path.read_text())
            if {key: before.get(key) for key in self.conditions} != self.conditions:
                raise SystemExit(f"{path} was measured otherwise: name another file, or remove it")
            self.programs, self.left_out = before["programs"], before["left_out"]

    @property
    def conditions(self) -> dict[str, Any]:
        """What must be alike in runs that share a file."""
        import torch

        return {
            "torch": torch.__version__,
            "repeats": self.repeats,
            "kind": "measured, CPU time, fake group of 8 ranks, backend aot_eager",
        }

    @property
    def done(self) -> set[str]:
        """Names of the programs that need not run again."""
        return {program["name"] for program in self.programs} | set(self.left_out)

    def add(self, name: str, record: dict[str, Any] | None) -> None:
        """Keep one program's record; None for one that cannot be compared."""
        if record:
            self.programs.append(record)
        else:
            self.left_out.append(name)
        if self.path and self.programs:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(self.result(), indent=1) + "\n")
            partial.replace(self.path)

    def result(self) -> dict[str, Any]:
        """Sums and ratios over all programs so far."""
        programs = self.programs
        total = {key: sum(p[key] for p in programs) for key in programs[0] if key != "name"}
        ratios = [p["ours_ms"] / p["stock_ms"] for p in programs]
        return {
            **self.conditions,
            "programs_compared": len(programs),
            "tracing_ratio": round(total["ours_ms"] / total["stock_ms"], 4),
            "tracing_ratio_median_program": round(statistics.median(ratios), 4),
            "guard_ratio": round(total["ours_guard_us"] / total["stock_guard_us"], 4),
            "programs": programs,
            "left_out": self.left_out,
        }


def show(result: dict[str, Any]) -> None:
    """A table of the sums and of the programs that lose most."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"torch {result['torch']}, {result['programs_compared']} programs")
    for column in ("", "stock", "ours", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    programs = result["programs"]
    for label, unit in (("tracing", "ms"), ("guards, one check", "guard_us")):
        stock, ours = (sum(p[f"{v}_{unit}"] for p in programs) for v in ("stock", "ours"))
        table.add_row(
            f"{label} ({unit[-2:]})", f"{stock:.1f}", f"{ours:.1f}", f"{ours / stock:.3f}"
        )
    table.add_section()
    for unit in ("ms", "guard_us"):
        worst = sorted(programs, key=lambda p: p[f"stock_{unit}"] - p[f"ours_{unit}"])[:8]
        for p in worst:
            stock, ours = p[f"stock_{unit}"], p[f"ours_{unit}"]
            ratio = f"{ours / stock:.2f}" if stock else ""
            table.add_row(f"{p['name']} ({unit[-2:]})", f"{stock:.1f}", f"{ours:.1f}", ratio)
        table.add_section()
    Console().print(table)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--case", default="", help="only programs whose name holds this")
    parser.add_argument("--every", type=int, default=1, help="a sample: one program of so many")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--write",
        type=Path,
        help="keep the JSON object in this file; a run cut short goes on from it",
    )
    arguments = parser.parse_args()
    run = load_corpus()
    bench = Bench(run)
    progress = Progress(arguments.write, arguments.repeats)
    with contextlib.redirect_stdout(sys.stderr):
        passed = passed_by_stock()
        chosen = [c for c in run.C.CASES if arguments.case in c["name"] and c["name"] in passed]
        chosen = chosen[:: arguments.every]
        for number, case in enumerate(chosen, 1):
            name = case["name"]
            if name in progress.done:
                continue
            record = bench.measure(case, arguments.repeats)
            progress.add(name, record)
            said = f"{record['ours_ms'] / record['stock_ms']:.2f}" if record else "left out"
            print(f"{number}/{len(chosen)} {name}: {said}", flush=True)
    result = progress.result()
    if arguments.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)


if __name__ == "__main__":
    main()
