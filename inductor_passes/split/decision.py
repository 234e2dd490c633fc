"""Record the decision on a graph, for reports."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.graph.printing import user_line
from inductor_passes.records import EndedRecord, RegionRecord, SplitRecord
from inductor_passes.split.choose import Choice
from inductor_passes.split.cut import Cutter
from inductor_passes.split.region import Region

MOST_ENDED = 8  # kinds of ends that are told


def record_of(choice: Choice, made: Sequence[Cutter], whole: str, seconds: float) -> SplitRecord:
    """Return the record of a choice, and of the cuts that were made of it, if any, in its order."""
    regions = _regions(choice, made) if made else ()
    tried = [region for step in choice.steps for region in step.regions]
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
        ended=_ended(tried),
        layers=choice.layers,
        layers_tried=choice.kept,
        regions=regions,
    )
    if choice.best is None or not regions:
        return record
    return dataclasses.replace(
        record,
        decision="; ".join(map(_said, regions)),
        parts=regions[0].parts,
        seed=regions[0].seed,
        along=regions[0].along,
        launches=sum(region.launches for region in regions),
        nodes=sum(region.nodes for region in regions),
        joins=sum(region.joins for region in regions),
        makespan_cut_us=choice.best.price.step_us,
    )


def _regions(choice: Choice, made: Sequence[Cutter]) -> tuple[RegionRecord, ...]:
    """A record of each way that was chosen and has regions in the whole graph."""
    left = iter(made)
    found = []
    for step in choice.steps:
        cutters = [next(left) for _ in step.regions]
        if not cutters:
            continue
        first = step.regions[0]
        lines = (user_line(launch) for region in step.regions for launch in region.launches)
        found.append(
            RegionRecord(
                parts=step.way.parts,
                seed=first.seed.name,
                along=str(step.way.cut),
                half=step.way.half,
                line=next(filter(None, lines), ""),
                count=len(step.regions),
                launches=sum(len(cutter.made) for cutter in cutters),
                nodes=sum(len(region.steps) for region in step.regions),
                joins=sum(cutter.joins for cutter in cutters),
                before_us=step.before_us,
                after_us=step.after_us,
                ended=_ended(step.regions),
            )
        )
    return tuple(found)


def _said(region: RegionRecord) -> str:
    half = f" in the {region.half}" if region.half else ""
    alike = f" and {region.count - 1} like it" if region.count > 1 else ""
    return f"cut in {region.parts} parts along {region.along} of %{region.seed}{alike}{half}"


def notes_of(record: SplitRecord) -> tuple[str, ...]:
    """Return lines for people: what was decided and why, and what ended each region."""
    times = f"{record.makespan_uncut_us:.0f} us scheduled whole"
    if record.parts > 1:
        times += f", {record.makespan_cut_us:.0f} cut"
    if record.layers > record.layers_tried:
        times += f" ({record.layers_tried} of {record.layers} equal layers)"
    limit = f"limit {record.limit_us:.0f}, {record.closed:.0%} of the distance closed"
    lines = [f"{record.decision}; {times}, {limit}"]
    lines += [
        f"tried {t.parts} parts along {t.along} of %{t.seed}{f', {t.half}' if t.half else ''}: "
        f"{t.launches} launches, {t.makespan_us:.0f} us"
        for t in record.tried
    ]
    if len(record.regions) < 2:
        return (*lines, *map(_end, record.ended))
    for region in record.regions:
        where = f" ({region.line})" if region.line else ""
        lines.append(
            f"{_said(region)}: {region.launches} launches{where}, "
            f"{region.before_us:.0f} us without, {region.after_us:.0f} with"
        )
        lines += [f"  {_end(end)}" for end in region.ended]
    return tuple(lines)


def _end(end: EndedRecord) -> str:
    stack = f" ({end.stack})" if end.stack else ""
    return f"ends at {end.count} x {end.operator}: {end.reason}{stack}"


def _ended(regions: Sequence[Region]) -> tuple[EndedRecord, ...]:
    """The operators that end regions, by reason, most frequent first, each with the line of the
    first of them.
    """
    found: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], fx.Node] = {}
    for node, reason in (item for region in regions for item in region.ended.items()):
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
