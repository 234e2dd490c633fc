"""Question: how far are predicted collectives and matrix products from published measurements?

    python tools/bench/cost_model_error.py --out tools/bench/results/cost_model_error.json

Baseline: Azure's figures of ND H100 v5 (NCCL 2.18.5) and ND H200 v5 (NCCL 2.20.5): bus bandwidth of
all_reduce on one node of eight GPUs, in place, and rates of products in FP8 by cuBLASLt
(github.com/Azure/AI-benchmarking-guide). Two figures of our topologies were fitted to the first,
the starts of LL and of the switch's reduction. The six cubes of the second are in the topologies as
measured: "formula" leaves them out, "measured" predicts the three other shapes from them. Nothing
is measured here, so there is no spread.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
from collections.abc import Iterator

from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.importing import product_us

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
# m, n, k and TFLOPS.
CUBES = tuple((1024 * 2**i,) * 3 for i in range(6))
OTHERS = ((1024, 2145, 1024), (6144, 12288, 12288), (802816, 192, 768))
PRODUCTS = {
    "h100x8": (274.1, 1011.3, 1216.9, 1290.1, 1377.3, 1382.2, 410.7, 1351.4, 663.8),
    "h200x8": (290.8, 1013.4, 1249.1, 1300.6, 1366.3, 1349.5, 407.9, 1318.0, 717.5),
}


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    rows = [*collectives(), *products()]
    errors: dict[str, list[float]] = {}
    for row in rows:
        print(" ".join(f"{key}={value}" for key, value in row.items()))
        errors.setdefault(row["table"], []).append(abs(row["error_percent"]))
    summary = {
        table: {"median_percent": round(statistics.median(off), 1), "worst_percent": max(off)}
        for table, off in errors.items()
    }
    for table, off in summary.items():
        print(table, off)
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/cost_model_error.py",
            "baseline": "Azure ND H100 v5 and ND H200 v5: all_reduce bus bandwidth, cuBLASLt FP8",
            "shapes": "all_reduce, eight ranks of one node, 1 KiB to 8 GiB; nine products",
            "summary": summary,
            "rows": rows,
        }
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


def collectives() -> Iterator[dict]:
    """All-reduce by the formulas."""
    for name, table in PUBLISHED.items():
        topology = load_topology(name)
        for doublings, gb_per_s in enumerate(table):
            payload = SMALLEST_KIB * 1024 * 2**doublings
            measured = 2 * (RANKS - 1) / RANKS * payload / gb_per_s / 1e3
            predicted = collective_us("all_reduce", payload, GroupShape(RANKS, 1), topology)
            size = "up to 4 MiB" if payload <= 4 * 2**20 else "8 MiB and more"
            yield row(f"all_reduce, {size}", name, f"{payload // 1024} KiB", measured, predicted)


def products() -> Iterator[dict]:
    """Products by the formulas, and those that were not measured by those that were."""
    for name, table in PRODUCTS.items():
        measuring = load_topology(name)
        formulas = dataclasses.replace(measuring, products=())
        for (m, n, k), tflops in zip((*CUBES, *OTHERS), table, strict=True):
            measured = 2 * m * n * k / tflops / 1e6
            shape = f"{m} x {n} x {k}"
            by_formula = product_us(formulas, "float8", (1, m, k, n))
            yield row("products, formula", name, shape, measured, by_formula)
            if (m, n, k) in OTHERS:
                by_curve = product_us(measuring, "float8", (1, m, k, n))
                yield row("products, measured", name, shape, measured, by_curve)


def row(table: str, topology: str, what: str, measured: float, predicted: float) -> dict:
    """One line of the report; times in microseconds."""
    return {
        "table": table,
        "topology": topology,
        "what": what,
        "measured_us": round(measured, 1),
        "predicted_us": round(predicted, 1),
        "error_percent": round(100 * (predicted / measured - 1), 1),
    }


if __name__ == "__main__":
    main()
