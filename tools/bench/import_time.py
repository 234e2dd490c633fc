#!/usr/bin/env python
"""What does importing the two packages cost beside ``import torch``?

Fresh processes, alternating; wall time of each, so start-up of Python is in all of them. Baseline:
``import torch``. Prints median and spread of each and the ratio, which must stay under 1.3, and what
the autoload hook adds to every ``import torch``. ``--json`` prints one object instead.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

CASES = {
    "import torch": "import torch",
    "import torch, no autoload": "import torch",
    "import dynamo_dist, inductor_passes": "import dynamo_dist, inductor_passes",
    "import torch, dynamo_dist, inductor_passes": "import torch, dynamo_dist, inductor_passes",
}
HOOK = """
import torch, time
start = time.perf_counter()
import dynamo_dist.autoload
dynamo_dist.autoload.register_log_names()
print(time.perf_counter() - start)
"""


def run(code: str, autoload: bool) -> tuple[float, str]:
    """Wall seconds and output of one fresh process."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if autoload else "0"}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    return time.perf_counter() - start, done.stdout


def measure(repeats: int) -> dict[str, object]:
    """Medians and ratios over ``repeats`` rounds, after one that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    hook: list[float] = []
    for _ in range(repeats + 1):  # the first round warms the page cache and the bytecode
        for name, code in CASES.items():
            seconds[name].append(run(code, autoload="no autoload" not in name)[0])
        hook.append(float(run(HOOK, autoload=False)[1]))
    summary = {
        name: {"median_s": statistics.median(s[1:]), "min_s": min(s[1:]), "max_s": max(s[1:])}
        for name, s in seconds.items()
    }
    torch_s = summary["import torch"]["median_s"]
    return {
        "seconds": summary,
        "ratio": summary["import dynamo_dist, inductor_passes"]["median_s"] / torch_s,
        "ratio_with_torch": summary["import torch, dynamo_dist, inductor_passes"]["median_s"]
        / torch_s,
        "autoload_hook_ms": 1000 * statistics.median(hook[1:]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = measure(arguments.repeats)
    if arguments.json:
        print(json.dumps(result, indent=2))
        return
    for name, times in result["seconds"].items():
        print(
            f"{name:45s} {times['median_s']:.3f} s ({times['min_s']:.3f} to {times['max_s']:.3f})"
        )
    print(
        f"ratio to import torch: {result['ratio']:.2f}, with torch {result['ratio_with_torch']:.2f}"
    )
    print(f"autoload hook: {result['autoload_hook_ms']:.1f} ms in every import torch")


if __name__ == "__main__":
    main()
