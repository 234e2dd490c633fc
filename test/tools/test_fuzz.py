"""The fuzzer: programs are drawn from their number alone, faults are found and cut down, ranks
that hang are told.
"""

import json
import os
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).parents[2]


def fuzz(folder, *arguments, timeout=1200):
    done = forked.run_script(
        ROOT / "tools" / "fuzz.py",
        *("--failures", folder, "--json", *arguments),
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, Path(__file__).parent))),
            "OMP_NUM_THREADS": "1",
        },
        timeout=timeout,
    )
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_forty_programs(tmp_path):
    found = fuzz(tmp_path, "--seed", "1100", "--programs", "40", "--minutes", "15", "--jobs", "2")
    assert found["failures"] == []
    assert found["programs"] == 40 and found["refused"] <= 4
    assert set(found["by_kind"]) == {"graph", "c10d", "dtensor", "module"}


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("fault", "kind", "seed"),
    [
        ("tracker", "c10d", 0),
        # Programs on DTensors take seconds; from here on it is the fifth that shows the fault.
        ("strategy", "dtensor", 57),
        ("rewrite", "graph", 0),
        ("scheduler", "graph", 0),
    ],
)
def test_a_planted_fault_is_found(fault, kind, seed, tmp_path):
    found = fuzz(
        tmp_path,
        *("--seed", str(seed)),
        *("--plant", f"planted_faults:{fault}", "--kind", kind, "--programs", "500"),
        *("--stop", "1", "--shrink", "0", "--minutes", "15", "--jobs", "2"),
    )
    (failure,) = found["failures"][:1]
    assert failure["status"] in ("mismatch", "crash", "hang")
    text = Path(failure["file"]).read_text()
    assert "def step(mesh" in text
    compile(text, failure["file"], "exec")
