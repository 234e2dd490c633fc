"""Committed figures that no machine changes are what the code makes of them."""

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "tools" / "bench"


def test_errors_of_the_cost_model_are_those_committed(tmp_path):
    made = tmp_path / "made.json"
    command = [sys.executable, str(BENCH / "cost_model_error.py"), "--out", str(made)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    committed = BENCH / "results" / "cost_model_error.json"
    assert json.loads(made.read_text()) == json.loads(committed.read_text())
