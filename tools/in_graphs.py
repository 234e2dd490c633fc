#!/usr/bin/env python
"""Write docs/dtensor-in-graphs.md: programs on DTensors, run on real ranks by stock torch.compile and with the plugin.

    python tools/in_graphs.py                      # run every row and write the page, some ten minutes on 2 cores
    python tools/in_graphs.py --only 'embedding'   # some rows; the others keep what the file of results says
    python tools/in_graphs.py --page               # the page anew from the file of results
    python tools/in_graphs.py --only maps --check  # run, say what is at fault, and write nothing

Exits with 1 if a row of ours is wrong, hangs or fails without saying why, or if stock passes one that ours does not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from comparison.in_graphs.page import counted, faults, page
from comparison.in_graphs.row import known
from comparison.in_graphs.run import SIDES, results, run

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "bench" / "results" / "dtensor_in_graphs.json"
PAGE = ROOT / "docs" / "dtensor-in-graphs.md"


def main(argv: list[str] | None = None) -> int:
    """Run rows and write what they came to; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="rows by name or section")
    parser.add_argument(
        "--side",
        action="append",
        choices=SIDES,
        help="run these alone, with --folder of a run of the others",
    )
    parser.add_argument("--folder", type=Path, help="keep what ranks wrote there")
    parser.add_argument("--page", action="store_true", help="run nothing")
    parser.add_argument("--check", action="store_true", help="write neither results nor the page")
    options = parser.parse_args(argv)
    if options.side and "eager" not in options.side and options.folder is None:
        parser.error("without eager there is nothing to compare with: --folder of a run of it")

    kept: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": {}}
    if not options.page:
        rows = {
            name: row
            for name, row in known().items()
            if re.search(options.only, f"{row.section}.{name}")
        }
        with tempfile.TemporaryDirectory() as made:
            folder = options.folder or Path(made)
            folder.mkdir(parents=True, exist_ok=True)
            run(rows, folder, tuple(options.side or SIDES))
            found = results(rows, folder)
        for name, each in found.items():
            for side in ("stock", "ours"):
                if side in each:
                    print(f"{name}, {side}: {each[side]['class']} {each[side]['why'][:300]}")
        if options.check:
            return _print_all(faults(found))
        merged = kept["rows"] | found
        kept = {
            "torch": torch.__version__.partition("+")[0],
            "rows": {name: merged[name] for name in known() if name in merged},
        }
        RESULTS.write_text(json.dumps(kept, indent=1) + "\n")
    PAGE.write_text(page(kept))
    print(counted(kept["rows"]))
    return _print_all(faults(kept["rows"]))


def _print_all(problems: list[str]) -> int:
    """Print problems; returns the exit status."""
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
