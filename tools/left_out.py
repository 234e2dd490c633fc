#!/usr/bin/env python
"""Leave out one kind of patch of torch after the other: which test fails without it?

    python tools/left_out.py                  # some 40 minutes on 2 cores
    python tools/left_out.py --only aot_partition --files 20
    python tools/left_out.py --write tools/bench/results/left_out.json

Each kind that ``doctor --changes`` lists is left out in a process of its own, in which the fast
tests run until one fails, those files first whose words are nearest to the patch's. Exits with 1 if
no test fails without some kind: that kind can go, or needs a test.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from workers import run

ROOT = Path(__file__).parents[1]
# They count patches, and so fail without any of them.
COUNTING = {"test/dynamo_dist/test_changes.py", "test/dynamo_dist/cli/test_doctor.py"}
# Tests of what enable() does not touch.
ELSEWHERE = {"inductor_passes", "gpu", "tools"}
WORDS = re.compile(r"[a-z]{3,}")
EVERYWHERE = {"dynamo", "dist", "torch", "compat", "test", "aten", "default", "the", "and", "that"}
NO_ANSWER = {"timeout": "a hang", "crash": "a crash"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of patch: its number in order, who makes it, who asks for it, and why."""

    number: int
    made_by: str
    asked_by: str
    about: str

    @property
    def name(self) -> str:
        """One maker may be asked by several modules."""
        return f"{self.made_by} for {self.asked_by.removeprefix('dynamo_dist.')}"


def main(argv: list[str] | None = None) -> int:
    """Leave out what is asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="by the function that makes it")
    parser.add_argument(
        "--files", type=int, default=6, help="files of tests to run at most, the nearest first"
    )
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=900, help="longer counts as a hang")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args(argv)

    chosen = [kind for kind in _kinds() if re.search(options.only, f"{kind.name} {kind.about}")]
    failing: dict[str, str] = {}
    for kind, answer in run(
        chosen, _set_up, (options.files,), options.jobs, options.seconds, lives=1
    ):
        found = answer if isinstance(answer, dict) else {"test": NO_ANSWER[answer], "seconds": 0}
        failing[kind.name] = found["test"]
        test = found["test"] or "NO TEST"
        print(f"{len(failing)} of {len(chosen)}: {test} fails without {kind.name}", flush=True)
        if options.write:
            content = {"torch": torch.__version__, "failing": failing}
            options.write.write_text(json.dumps(content, indent=1) + "\n")
    untested = [name for name, test in failing.items() if not test]
    print(f"{len(failing)} kinds left out; without a test: {', '.join(untested) or 'none'}")
    return bool(untested)


def _kinds() -> list[Kind]:
    from dynamo_dist import patch_stack
    from dynamo_dist.patches import by_kind, listed
    from dynamo_dist.settings import DistConfig
    from dynamo_dist.torch_compat.patching import makers_recorded

    with makers_recorded():
        kinds = by_kind(patch_stack.patches(DistConfig.from_env()))
    return [
        Kind(number, entry.made_by, asking, f"{entry.how} {entry.why}".strip())
        for number, ((_, asking), entry) in enumerate(zip(kinds, listed(), strict=True))
    ]


def _set_up(files: int) -> Callable[[Kind], dict[str, Any]]:
    logging.disable(logging.NOTSET)
    warnings.resetwarnings()
    os.chdir(ROOT)

    def without(kind: Kind) -> dict[str, Any]:
        start = time.monotonic()
        plugin = _Without(kind)
        command = ["-xq", "-m", "not slow", "-p", "no:cacheprovider", *_nearest(kind)[:files]]
        with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
            pytest.main(command, plugins=[plugin])
        return {"test": plugin.failed, "seconds": round(time.monotonic() - start, 1)}

    return without


class _Without:
    """A plugin of pytest that leaves out a kind of patch, and keeps the first test that failed."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.failed = kind, ""

    def pytest_configure(self) -> None:
        from dynamo_dist import patch_stack, patches
        from dynamo_dist.torch_compat.patching import makers_recorded

        complete = patch_stack.patches

        def without(*args: Any, **kwargs: Any) -> list[Any]:
            with makers_recorded():
                made = complete(*args, **kwargs)
            left = list(patches.by_kind(made).values())[self.kind.number]
            return [each for each in made if not any(each is out for out in left)]

        patch_stack.patches = without

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def _nearest(kind: Kind) -> list[str]:
    """List the files of fast tests, those beside the asking module first, then by shared words."""
    words = set(WORDS.findall(f"{kind.made_by} {kind.about}".lower())) - EVERYWHERE
    maker = kind.made_by.rpartition(".")[2].strip("_")
    module = kind.asked_by.rpartition(".")[2]

    def near(file: Path) -> tuple[int, int]:
        text = (ROOT / file).read_text()
        own = 4 * (module in file.stem) + 2 * (maker in text) + 2 * (module in text)
        of_name = words & set(WORDS.findall(str(file)))
        return -own - len(of_name), -sum(word in text for word in words)

    files = [file.relative_to(ROOT) for file in (ROOT / "test").rglob("test_*.py")]
    return [
        str(file)
        for file in sorted(files, key=near)
        if not ELSEWHERE & set(file.parts) and str(file) not in COUNTING
    ]


if __name__ == "__main__":
    sys.exit(main())
