"""Question: how many bytes do the rewrites keep off the link, and how many launches do they save?

    python tools/bench/rewrite_bytes.py --out tools/bench/results/rewrite_bytes.json

Baseline: the same graphs without rewrites. Counted on graphs traced from ``zoo.py`` on a fake group of
eight CPU ranks, not measured: bytes that one rank sends in a ring. On a CPU mesh this torch changes the
sharded dimension by a gather and a slice; on CUDA by an all_to_all, so there ``compose_redistributes``
finds less. ``memory`` is what copies that are gone would have written.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import time

import torch
import zoo
from torch import fx

from inductor_passes.attach.capture import Captured, capturing
from inductor_passes.base import GraphPass
from inductor_passes.graph.collectives import group_size, kind, launches, payload_bytes
from inductor_passes.pipeline import run_pass
from inductor_passes.rewrite import REWRITES
from inductor_passes.testing import fake_group


def link_bytes(launch: fx.Node) -> float:
    """Bytes that one rank sends: a ring, or for an all_to_all what goes to others."""
    n, payload = group_size(launch), payload_bytes(launch)
    factor = {"all_gather": n - 1, "all_reduce": 2 * (n - 1) / n}.get(kind(launch), (n - 1) / n)
    return factor * payload


def measured(graphs: list[Captured], passes: tuple[type[GraphPass], ...]) -> dict[str, float]:
    """Bytes, launches and seconds of copies of ``graphs`` after ``passes``."""
    totals = {"link_kib": 0.0, "launches": 0, "memory_kib": 0.0, "ms": 0.0}
    for captured in graphs:
        graph = fx.Graph()
        graph.output(graph.graph_copy(captured.graph, {}))
        start = time.perf_counter()
        records = [run_pass(cls(), graph) for cls in passes]
        totals["ms"] += 1e3 * (time.perf_counter() - start)
        for record in records:
            if record.name == "gather_without_copy":
                totals["memory_kib"] += record.counters.get("bytes_saved", 0) / 1024
        totals["launches"] += len(launches(graph))
        totals["link_kib"] += sum(map(link_bytes, launches(graph))) / 1024
    return {key: round(value, 1) for key, value in totals.items()}


def main() -> None:
    """Trace, rewrite, count, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--only", nargs="*", help="names of the zoo")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = []
    for name, program in zoo.ZOO.items():
        if options.only and name not in options.only:
            continue
        torch.compiler.reset()
        with fake_group(8), capturing() as (backend, graphs):
            program(functools.partial(torch.compile, backend=backend, fullgraph=True))
            before = measured(graphs, ())
            row: dict[str, object] = {
                "program": name,
                "nodes": sum(len(g.graph.nodes) for g in graphs),
            }
            row["without"] = before
            row["with_all"] = measured(graphs, REWRITES)
            row["saved_by"] = {}
            for cls in REWRITES:
                after = measured(graphs, (cls,))
                saved = {
                    "link_kib": round(before["link_kib"] - after["link_kib"], 1),
                    "launches": before["launches"] - after["launches"],
                    "memory_kib": after["memory_kib"],
                }
                if any(saved.values()):
                    row["saved_by"][cls.name] = saved  # type: ignore[index]
        rows.append(row)
        print(json.dumps(row))
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/rewrite_bytes.py",
            "torch": torch.__version__,
            "rows": rows,
        }
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
