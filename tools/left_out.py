#!/usr/bin/env python
"""Leave out one change of ``enable()`` after the other: which test misses it? One that no test misses can go.

    python tools/left_out.py                     # every kind of change that doctor --changes lists: hours
    python tools/left_out.py --nearest 6         # some 40 minutes; run what no test misses once more, without it
    python tools/left_out.py --only 'aot.partition' --places
    python tools/left_out.py --nearest 6 --write tools/bench/results/left_out.json

Each change is left out in a process of its own, in which the fast tests run, those files first whose words are
nearest to the change's, until one fails. Exits with 1 if one was missed by no test.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from workers import run

ROOT = Path(__file__).parents[1]
# They count changes, and so miss all of them.
COUNTING = {"test/dynamo_dist/test_changes.py", "test/dynamo_dist/cli/test_doctor.py"}
ELSEWHERE = {"inductor_passes", "gpu", "tools"}  # tests of what enable() does not touch
WORDS = re.compile(r"[a-z]{3,}")
EVERYWHERE = {"dynamo", "dist", "torch", "compat", "test", "aten", "default", "the", "and", "that"}
NO_ANSWER = {"timeout": "a hang", "crash": "a crash"}


@dataclass(frozen=True, slots=True)
class Left:
    """What is left out: changes of one kind, or one place of them."""

    kind: int  # of those that enable() makes, from 0
    place: int | None  # of its places, or all
    name: str
    asked_by: str  # the module that wants it
    about: str


@dataclass(frozen=True, slots=True)
class Found:
    """The first test that fails without a change; empty if all pass."""

    name: str
    about: str
    missed_by: str
    seconds: float


def main(argv: list[str] | None = None) -> int:
    """Leave out what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only",
        default="",
        metavar="REGEX",
        help="by the function that makes it, its place or reason",
    )
    parser.add_argument("--places", action="store_true", help="each place alone, not all of a kind")
    parser.add_argument(
        "--most", type=int, default=100, help="with --places: none of a kind of more places"
    )
    parser.add_argument(
        "--nearest", type=int, metavar="N", help="run no more than so many files of tests"
    )
    parser.add_argument(
        "--together",
        action="store_true",
        help="all at once first: then each alone in those files alone that failed",
    )
    parser.add_argument("--files", nargs="*", metavar="FILE", help="run these files of tests")
    parser.add_argument("--marked", default="not slow", metavar="EXPRESSION", help="which tests")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=1800, help="for one change: longer counts as a hang"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write what was found, as it is found"
    )
    options = parser.parse_args(argv)

    found: list[Found] = []
    chosen = [
        left for left in _all_left(options) if re.search(options.only, f"{left.name} {left.about}")
    ]
    if options.together:
        failing = _together(chosen, options.marked)
        print(
            f"without all {len(chosen)}, tests fail in: {', '.join(failing) or 'no file'}",
            flush=True,
        )
        options.files = failing
    for left, answer in run(
        chosen,
        _set_up,
        (options.nearest, options.files, options.marked),
        options.jobs,
        options.seconds,
        lives=1,
    ):
        record = (
            answer
            if isinstance(answer, dict)
            else {"missed_by": NO_ANSWER[answer], "seconds": options.seconds}
        )
        each = Found(left.name, left.about, **record)
        found.append(each)
        print(
            f"{len(found)} of {len(chosen)}: {each.missed_by or 'NO TEST'} misses {each.name} ({each.seconds} s)",
            flush=True,
        )
        if options.write:
            _write(options.write, found)
    needless = [each.name for each in found if not each.missed_by]
    print(f"{len(found)} left out one by one; missed by no test: {', '.join(needless) or 'none'}")
    return bool(needless)


def _all_left(options: argparse.Namespace) -> Iterator[Left]:
    from dynamo_dist import activation
    from dynamo_dist.changes import by_kind, listed
    from dynamo_dist.config import DistConfig
    from dynamo_dist.torch_compat.changes import makers_noted

    with makers_noted():
        kinds = by_kind(activation.changes(DistConfig.from_env()))
    for kind, ((_, asking), entry) in enumerate(zip(kinds, listed(), strict=True)):
        about = f"{entry.how} {entry.why}".strip()
        if not options.places:
            yield Left(kind, None, f"{entry.made_by}: {entry.places[0]}", asking, about)
        elif 1 < len(entry.places) <= options.most:
            for place, name in enumerate(entry.places):
                yield Left(kind, place, f"{entry.made_by}: {name}", asking, about)


def _set_up(
    nearest: int | None, files: list[str] | None, marked: str
) -> Callable[[Left], dict[str, Any]]:
    logging.disable(logging.NOTSET)
    warnings.resetwarnings()
    os.chdir(ROOT)

    def without(left: Left) -> dict[str, Any]:
        start = time.monotonic()
        first = _First(left)
        command = [
            "-xq",
            "-m",
            marked,
            "-p",
            "no:cacheprovider",
            *(_nearest_first(left)[:nearest] if files is None else files),
        ]
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            status = pytest.main(command, plugins=[first])
        missed = first.failed or (
            "" if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else f"pytest, with {status!r}"
        )
        return {"missed_by": missed, "seconds": round(time.monotonic() - start, 1)}

    return without


def _together(chosen: list[Left], marked: str) -> list[str]:
    """The files of tests that fail without all of them."""
    everyone = _First(*chosen)
    command = ["-q", "-m", marked, "-p", "no:cacheprovider", *_nearest_first(chosen[0])]
    pytest.main(command, plugins=[everyone])
    return list(dict.fromkeys(test.split("::")[0] for test in everyone.all_failed))


class _First:
    """A plugin of pytest: leaves out changes, and keeps the tests that failed."""

    def __init__(self, *left: Left) -> None:
        self.left, self.all_failed = left, list[str]()

    @property
    def failed(self) -> str:
        return self.all_failed[0] if self.all_failed else ""

    def pytest_configure(self) -> None:
        from dynamo_dist import activation, changes
        from dynamo_dist.torch_compat.changes import makers_noted

        complete = activation.changes

        def without(*args: Any, **kwargs: Any) -> list[Any]:
            with makers_noted():
                made = complete(*args, **kwargs)
            kinds, without = list(changes.by_kind(made).values()), set[int]()
            for left in self.left:
                places = kinds[left.kind] if left.place is None else [kinds[left.kind][left.place]]
                without.update(map(id, places))
            return [change for change in made if id(change) not in without]

        activation.changes = without

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.all_failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.all_failed.append(report.nodeid)


def _nearest_first(left: Left) -> list[str]:
    """The files of fast tests: those beside the module that asks for the change, then by the words they share."""
    words = set(WORDS.findall(f"{left.name} {left.about}".lower())) - EVERYWHERE
    place = left.name.rpartition(".")[2].strip("_")
    *folder, module = left.asked_by.removesuffix(".registry").split(".")

    def near(file: Path) -> tuple[int, int]:
        text = (ROOT / file).read_text()
        own = 4 * (module in file.stem) + 3 * (file.parts[1:-1] == (*folder,))
        own += 2 * (place in text) + 2 * (module in text)
        of_name = words & set(WORDS.findall(str(file)))
        return -own - len(of_name), -sum(word in text for word in words)

    files = [file.relative_to(ROOT) for file in (ROOT / "test").rglob("test_*.py")]
    files = [
        file for file in files if not ELSEWHERE & set(file.parts) and str(file) not in COUNTING
    ]
    return [str(file) for file in sorted(files, key=near)]


def _write(path: Path, found: list[Found]) -> None:
    counts = {
        "left_out": len(found),
        "missed_by_no_test": sum(not each.missed_by for each in found),
    }
    path.write_text(
        json.dumps(
            {"torch": torch.__version__, **counts, "changes": [asdict(each) for each in found]},
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    sys.exit(main())
