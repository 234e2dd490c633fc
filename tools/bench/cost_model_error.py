"""Question: how far are predicted collectives from published measurements?

    python tools/bench/cost_model_error.py --out tools/bench/results/cost_model_error.json

Baseline: bus bandwidth of all_reduce on one node of eight GPUs, in place, as Azure published it for ND
H100 v5 (NCCL 2.18.5) and ND H200 v5 (NCCL 2.20.5): github.com/Azure/AI-benchmarking-guide. Two figures
of our topologies were fitted to these tables, the starts of LL and of the switch's reduction; the others
come from elsewhere. Nothing is measured here, so there is no spread.
"""

from __future__ import annotations

import argparse
import json
import statistics

from inductor_passes.cost import load_topology
from inductor_passes.cost.alpha_beta import collective_us
from inductor_passes.cost.group_shape import GroupShape

RANKS = 8
SMALLEST_KIB = 1
# GB/s; the payload doubles from 1 KiB to 8 GiB.
PUBLISHED = {
    "h100x8": (
        0.07, 0.14, 0.27, 0.53, 0.95, 1.71, 2.72, 5.40, 10.86, 21.35, 43.70, 81.93, 128.73, 172.13,
        234.45, 295.53, 361.78, 400.61, 423.38, 438.46, 466.35, 472.36, 475.54, 478.87,
    ),
    "h200x8": (
        0.06, 0.12, 0.23, 0.47, 0.93, 1.84, 3.72, 7.39, 14.75, 29.38, 52.96, 88.78, 138.44, 181.94,
        240.41, 300.91, 368.11, 412.45, 432.24, 442.72, 467.58, 472.57, 477.41, 479.98,
    ),
}  # fmt: skip


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    rows = []
    for name, table in PUBLISHED.items():
        topology = load_topology(name)
        for doublings, gb_per_s in enumerate(table):
            payload = SMALLEST_KIB * 1024 * 2**doublings
            measured = 2 * (RANKS - 1) / RANKS * payload / gb_per_s / 1e3
            predicted = collective_us("all_reduce", payload, GroupShape(RANKS, 1), topology)
            rows.append(
                {
                    "topology": name,
                    "payload_kib": payload // 1024,
                    "measured_us": round(measured, 1),
                    "predicted_us": round(predicted, 1),
                    "error_percent": round(100 * (predicted / measured - 1), 1),
                }
            )
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()))
    summary = {}
    for label, least, most in (("up to 4 MiB", 0, 4096), ("8 MiB and more", 8192, 2**30)):
        errors = [abs(r["error_percent"]) for r in rows if least <= r["payload_kib"] <= most]
        summary[label] = {"median_percent": statistics.median(errors), "worst_percent": max(errors)}
        print(label, summary[label])
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/cost_model_error.py",
            "baseline": "Azure ND H100 v5 and ND H200 v5, all_reduce bus bandwidth",
            "shapes": "all_reduce, eight ranks of one node, 1 KiB to 8 GiB",
            "summary": summary,
            "rows": rows,
        }
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
