#!/usr/bin/env python
"""What ``tools/matrix.sh`` runs in each environment, and the table it makes of it.

    python tools/matrix.py one 2.13.0 [--results FOLDER] [--only tests|corpus]
    python tools/matrix.py table [--results FOLDER]

``one`` runs in an environment that has this torch. It writes ``matrix_VERSION.json``: the fast
tests (passed, failed, skipped), and how the corpus's programs end with upstream torch and with this
package; ``lost`` are those that only upstream passes. Exits with 1 for a failed test or a lost
program. A part that does not run keeps what the file said of it.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "test" / "corpus"
PROCESSES = 2


def environ() -> dict[str, str]:
    """This checkout before any installed copy, and one thread for each process."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_tests() -> dict[str, Any]:
    """The fast tests' counts, and the names of those that failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}"]
        subprocess.run(command, cwd=ROOT, env=environ(), stdout=sys.stderr, check=False)
        cases = list(ElementTree.parse(report).iter("testcase"))
    ends: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in cases:
        tags = {child.tag for child in case}
        end = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else ""
        ends[end or "passed"].append(f"{case.get('classname')}::{case.get('name')}")
    return {
        "passed": len(ends["passed"]),
        "skipped": len(ends["skipped"]),
        "failed": sorted(ends["failed"]),
    }


def run_corpus(options: list[str]) -> list[dict[str, Any]]:
    """Every program's record. Families stay together: some of their programs build on one
    another.
    """
    listed = [json.loads(line) for line in (CORPUS / "upstream_2.13.0.jsonl").open()]
    families = sorted({record["family"] for record in listed})
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for part in range(PROCESSES):
            mine = set(families[part::PROCESSES])
            names, out = Path(folder) / f"names{part}", Path(folder) / f"out{part}"
            names.write_text("\n".join(r["name"] for r in listed if r["family"] in mine))
            command = [sys.executable, "-W", "ignore", "run_some.py", str(names)]
            command += ["--timeout", "300", "--out", str(out), *options]
            quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
            processes.append((out, subprocess.Popen(command, cwd=CORPUS, env=environ(), **quiet)))
        found = []
        for out, process in processes:
            process.wait()
            found += [json.loads(line) for line in out.read_text().splitlines()]
    return found


def upstream_records(version: str) -> list[dict[str, Any]]:
    """What upstream makes of the programs; run once for each version and kept with the corpus."""
    kept = CORPUS / f"upstream_{version}.jsonl"
    if not kept.exists():
        kept.write_text("".join(json.dumps(record) + "\n" for record in run_corpus([])))
    return [json.loads(line) for line in kept.open()]


def compare(upstream: list[dict[str, Any]], ours: list[dict[str, Any]]) -> dict[str, Any]:
    """Ends of upstream and of ours, and which programs each passes alone."""
    ends = {record["name"]: record for record in ours}
    passed = {record["name"] for record in upstream if record["status"] == "pass"}
    passed_by_us = {name for name, record in ends.items() if record["status"] == "pass"}
    return {
        "upstream": dict(collections.Counter(record["status"] for record in upstream)),
        "ours": dict(collections.Counter(record["status"] for record in ours)),
        "gained": sorted(passed_by_us - passed),
        "lost": {
            name: ends.get(name, {}).get("detail", "no record")
            for name in sorted(passed - passed_by_us)
        },
        "others": {
            name: f"{record['status']}: {record['detail']}"
            for name, record in sorted(ends.items())
            if record["status"] not in ("pass", "eager-fails")
        },
    }


def one(version: str, results: Path, only: str) -> int:
    """Run what was asked for in this environment; 1 if a test failed or a program was lost."""
    import torch

    if torch.__version__.split("+")[0] != version:
        print(f"{sys.executable} has torch {torch.__version__}, not {version}.", file=sys.stderr)
        return 2
    path = results / f"matrix_{version}.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record["torch"] = torch.__version__
    record["python"] = ".".join(map(str, sys.version_info[:3]))
    parts = {
        "corpus": lambda: compare(
            upstream_records(version), run_corpus(["--plugin", "dynamo_dist"])
        ),
        "tests": run_tests,
    }
    for part, function in parts.items():
        if only in ("", part):
            record[part] = function()
            path.write_text(json.dumps(record, indent=1) + "\n")
    return int(
        bool(record.get("tests", {}).get("failed")) or bool(record.get("corpus", {}).get("lost"))
    )


def table(results: Path) -> str:
    """One row for each version that has a record."""
    lines = [
        "# What passes on each torch",
        "",
        "Made by `tools/matrix.sh`: the fast tests, and the programs of `test/corpus` (fake group "
        "of 8",
        "ranks, `aot_eager`) with upstream torch and with this package. Lost: passed by upstream "
        "alone.",
        "",
        "| torch | Python | fast tests | programs | upstream passes | we pass | lost | break | "
        "error | wrong | recompile |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    paths = sorted(
        results.glob("matrix_*.json"),
        key=lambda path: [int(n) for n in path.stem.removeprefix("matrix_").split(".")],
    )
    for path in paths:
        record = json.loads(path.read_text())
        tests, corpus = record.get("tests"), record.get("corpus", {})
        ours = collections.Counter(corpus.get("ours", {}))
        ran = f"{tests['passed']} pass, {len(tests['failed'])} fail" if tests else "not run"
        cells = [record["torch"], record["python"], ran, sum(ours.values())]
        cells += [corpus.get("upstream", {}).get("pass", "")]
        cells += [ours["pass"], len(corpus.get("lost", {}))]
        cells += [ours[end] for end in ("break", "error", "wrong", "recompile")]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run one environment or make the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("one", "table"))
    parser.add_argument("version", nargs="?", default="")
    parser.add_argument("--results", type=Path, default=ROOT / "tools" / "bench" / "results")
    parser.add_argument("--only", choices=("tests", "corpus"), default="")
    arguments = parser.parse_args()
    if arguments.what == "one":
        sys.exit(one(arguments.version, arguments.results, arguments.only))
    text = table(arguments.results)
    (arguments.results / "matrix.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
