"""A sample of the sweep: stock is found wrong where it is, ours is right, and records are resumed."""

import json
import os
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]
SAMPLE = "^(nn_functional_(mse_loss|conv2d|avg_pool2d|prelu)|norm_inf|scatter_reduce_sum|cummax)$"


def sweep(rules, folder):
    command = [ROOT / "tools" / "check_strategies.py", "--rules", rules, "--ops", SAMPLE]
    done = forked.run_script(
        *(*command, "--limit", 2, "--results", folder, "--json"),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_sample(tmp_path):
    found = sweep("both", tmp_path)
    verdicts = {
        rules: {r["name"]: r["verdict"] for r in found[rules]} for rules in ("stock", "ours")
    }
    assert set(verdicts["ours"].values()) == {"ok"}
    assert verdicts["stock"]["nn_functional_conv2d"] == "wrong"
    assert verdicts["stock"]["scatter_reduce_sum"].startswith("no strategy")
    assert sweep("both", tmp_path) == found  # from the records: nothing ran again
