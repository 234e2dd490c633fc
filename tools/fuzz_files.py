"""Mutants of every format of file that is read: each gives a result, or one line and exit status 2,
in time.

    python tools/fuzz_files.py [--mutants N] [--seed N] [--only FORMAT] [--keep FOLDER] [--json]

Exit status 0 if all did, 1 if one did not. Mutants depend on the seed alone.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from fuzzing.file_examples import Example, examples, folder
from fuzzing.file_mutants import mutant

MOST_S, MOST_BYTES = 2.0, 2**30


@dataclass(frozen=True)
class Failure:
    """A file that a reader did not take as it should: ``why`` in one line, ``detail`` in many."""

    format: str
    seed: str
    why: str
    detail: str
    content: bytes


class TooLongError(Exception):
    """A reader took more than several times what it may."""


def judge(format_: str, seed: str, content: bytes, example: Example, path: Path) -> Failure | None:
    """Read one file; what is wrong with how it was read, or None."""

    def failed(why: str, detail: str = "") -> Failure:
        return Failure(format_, seed, why, detail, content)

    def stop(number: int, frame: object) -> None:
        raise TooLongError

    path.write_bytes(content)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 5 * MOST_S)
    start, highest = time.process_time(), _highest_bytes()
    try:
        status, said = example.read(path)
    except TooLongError:
        return failed("never ended", traceback.format_exc())
    except (Exception, SystemExit) as error:
        return failed(f"{type(error).__name__}: {error}"[:200], traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.process_time() - start
    if seconds > MOST_S:
        return failed(f"took {seconds:.1f} s of processor time")
    if _highest_bytes() - highest > MOST_BYTES:
        return failed("took more than 1 GiB")
    if status not in (0, 2):
        return failed(f"exit status {status}", said)
    if status == 2 and (said.count("\n") != 1 or not said.startswith("error: ")):
        return failed("not one line", said)
    return None


def _highest_bytes() -> int:
    """The most memory that this process ever had; one that was started by a large one has had as
    much as that.
    """
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(format_: str, count: int, seed: int) -> list[Failure]:
    """Judge ``count`` mutants of one format, and the example itself."""
    example = examples()[format_]
    found = []
    with folder() as where:
        path = Path(where) / "file.json"
        whole = judge(format_, "whole", example.text.encode(), example, path)
        if whole is not None:
            found.append(whole)
        for number in range(count):
            name = f"{format_} {seed} {number}"
            content = mutant(example.text, random.Random(name))
            failure = judge(format_, name, content, example, path)
            if failure is not None:
                found.append(failure)
    return found


def main() -> int:
    """Judge all, and say what failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--mutants", type=int, default=400, help="of each format; default 400")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(examples()), help="one format")
    parser.add_argument("--keep", type=Path, help="write files that failed here")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    result: dict[str, dict[str, object]] = {}
    for format_ in [options.only] if options.only else examples():
        failures = run(format_, options.mutants, options.seed)
        result[format_] = {
            "mutants": options.mutants,
            "failures": [{"seed": f.seed, "why": f.why, "detail": f.detail} for f in failures],
        }
        if not options.json:
            print(f"{format_}: {options.mutants} mutants, {len(failures)} failures", flush=True)
            for why in sorted({f.why for f in failures}):
                first = next(f for f in failures if f.why == why)
                print(
                    f"  {why} ({first.seed})\n    " + "\n    ".join(first.detail.splitlines()[-6:])
                )
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            for failure in failures:
                (options.keep / failure.seed.replace(" ", "_")).write_bytes(failure.content)
    if options.json:
        print(json.dumps(result))
    return int(any(of["failures"] for of in result.values()))


if __name__ == "__main__":
    sys.exit(main())
