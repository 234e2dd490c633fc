"""The decision on a graph as a record, and as lines for reports."""

from __future__ import annotations

import dataclasses
from collections import Counter

import torch
from torch import fx

from inductor_passes.graph.source_lines import user_line
from inductor_passes.records import EndedRecord, SplitRecord
from inductor_passes.split.choose import Choice
from inductor_passes.split.cut import Cutter
from inductor_passes.split.region import Region

MOST_ENDED = 8  # kinds of ends that are told


def record_of(choice: Choice, made: Cutter | None, whole: str, seconds: float) -> SplitRecord:
    """Return the record of a choice, and of the cut that was made of it, if any."""
    best, cut = choice.best, choice.region
    record = SplitRecord(
        decision=f"left whole: {whole}",
        parts=1,
        seed="",
        along="",
        launches=0,
        nodes=0,
        joins=0,
        makespan_uncut_us=choice.uncut_us,
        makespan_cut_us=choice.uncut_us,
        limit_us=choice.limit_us,
        seconds=seconds,
        tried=choice.tried,
        ended=_ended(cut) if cut is not None else (),
        layers=choice.layers,
        layers_tried=choice.kept,
    )
    if best is None or cut is None or made is None:
        return record
    return dataclasses.replace(
        record,
        decision=f"cut in {cut.parts} parts along {cut.cut} of %{cut.seed.name}",
        parts=cut.parts,
        seed=cut.seed.name,
        along=str(cut.cut),
        launches=len(made.made),
        nodes=len(cut.steps),
        joins=made.joins,
        makespan_cut_us=best.makespan_us,
    )


def notes_of(record: SplitRecord) -> tuple[str, ...]:
    """Return lines for people: what was decided and why, and what ended the region."""
    times = f"{record.makespan_uncut_us:.0f} us scheduled whole"
    if record.parts > 1:
        times += f", {record.makespan_cut_us:.0f} cut"
    if record.layers > record.layers_tried:
        times += f" ({record.layers_tried} of {record.layers} equal layers)"
    limit = f"limit {record.limit_us:.0f}, {record.closed:.0%} of the distance closed"
    lines = [f"{record.decision}; {times}, {limit}"]
    lines += [
        f"tried {t.parts} parts along {t.along} of %{t.seed}: {t.launches} launches, {t.makespan_us:.0f} us"
        for t in record.tried
    ]
    lines += [
        f"ends at {end.count} x {end.operator}: {end.reason}"
        + (f" ({end.stack})" if end.stack else "")
        for end in record.ended
    ]
    return tuple(lines)


def _ended(region: Region) -> tuple[EndedRecord, ...]:
    """The operators that end a region, by reason, most frequent first, each with the line of the first of them."""
    found: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], fx.Node] = {}
    for node, reason in region.ended.items():
        target = node.target
        name = (
            str(target)
            if isinstance(target, torch._ops.OpOverload)
            else getattr(target, "__name__", str(target))
        )
        found[name, reason] += 1
        first.setdefault((name, reason), node)
    return tuple(
        EndedRecord(name, reason, user_line(first[name, reason]), count)
        for (name, reason), count in found.most_common(MOST_ENDED)
    )
