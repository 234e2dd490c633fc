"""All cases of one operator, and the verdict over them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from comparison.strategies.case import OUTCOMES, Outcome, check, expected
from comparison.strategies.compiled import problem
from comparison.strategies.layouts import describe, layouts
from comparison.strategies.samples import EVEN, UNEVEN, Sample, samples, set_sizes, tensors
from comparison.strategies.unequal import SAMPLES

from dynamo_dist.numerics.ranks import all_ranks
from dynamo_dist.testing import fake_mesh

MESHES = ((4,), (2, 2))
LAYOUTS = {1: 2, 2: 1}  # layouts of a sample, by the dimensions of the mesh
LAYOUTS_OF_UNEQUAL = {1: 6, 2: 3}
COMPILED = 2  # samples of an operator that are compiled
SIZES = {"even": EVEN, "uneven": UNEVEN}


@dataclass
class Report:
    """One operator. ``examples`` has the first case of each outcome that is not ok."""

    name: str
    verdict: str = "no tensor input"
    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)


def sweep(name: str, op: Any, limit: int) -> Report:
    """Check ``op`` on up to ``limit`` samples of each kind of sizes, and as many layouts of
    each.
    """
    report = Report(name)
    counts: Counter[str] = Counter()
    compiled: list[Sample] = []
    for sizes, values in SIZES.items():
        set_sizes(values)
        unequal = SAMPLES[name]() if name in SAMPLES and sizes == "even" else []
        drawn = [
            (sample, expected(sample, op.supports_autograd, "empty" not in name))
            for sample in (*samples(op, limit), *unequal)
            # DTensor has no sparse layouts.
            if tensors(sample) and all(t.layout == torch.strided for t in tensors(sample))
        ]
        if sizes == "even":
            compiled = [sample for sample, reference in drawn if reference is not None][:COMPILED]
        for mesh_shape in MESHES:
            with all_ranks(*mesh_shape) as mesh:
                for at, (sample, reference) in enumerate(drawn):
                    if reference is None:
                        continue
                    seed = f"{name} {sizes} {mesh_shape} {at}"
                    number = (
                        LAYOUTS_OF_UNEQUAL if any(sample is each for each in unequal) else LAYOUTS
                    )
                    found = layouts(tensors(sample), len(mesh_shape), number[len(mesh_shape)], seed)
                    for layout in found:
                        outcome = check(sample, reference, mesh, layout, op.supports_autograd)
                        counts[outcome.kind] += 1
                        _example(report, outcome, f"{seed} {describe(layout)}")
    for sample in compiled:
        with fake_mesh(4) as mesh:
            (layout,) = layouts(tensors(sample), 1, 1, f"{name} compiled")
            found = problem(sample, mesh, layout)
        outcome = Outcome("error compiled", found) if found else Outcome("ok")
        counts[outcome.kind] += 1
        _example(report, outcome, f"{name} compiled {describe(layout)}")
    report.counts = {kind: counts[kind] for kind in OUTCOMES if counts[kind]}
    if counts:
        report.verdict = next(kind for kind in OUTCOMES if counts[kind])
    return report


def _example(report: Report, outcome: Outcome, where: str) -> None:
    if outcome.kind != "ok":
        report.examples.setdefault(outcome.kind, f"{where}: {outcome.detail}")
