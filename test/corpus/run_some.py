"""``run.py`` on the programs that a file names, one a line: python run_some.py FILE [run.py's options]."""

import sys
from pathlib import Path

wanted = set(Path(sys.argv.pop(1)).read_text().split())

import run  # noqa: E402  (reads sys.argv, and imports the programs)

run.C.CASES[:] = [case for case in run.C.CASES if case["name"] in wanted]
run.main()
