"""Reports of several ranks as one: where ranks differ comes first, because there they may hang."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dynamo_dist.diagnostics.records import RunReport
from inductor_passes.records import GraphRecord
from inductor_passes.report.figures import SCHEMA_VERSION, count_of, split_line, titled


@dataclass(frozen=True, slots=True)
class RankDifference:
    """Something on which ranks disagree: each value with the ranks that have it, most ranks
    first.
    """

    what: str
    values: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class MergedReport:
    """Reports of several ranks of one run, by rank. ``missing`` are ranks that gave none."""

    reports: tuple[RunReport, ...]
    differences: tuple[RankDifference, ...]
    missing: tuple[int, ...]

    @property
    def first(self) -> RunReport:
        """The report of the lowest rank: what is equal on all ranks is read from it."""
        return self.reports[0]

    def to_json(self) -> dict[str, object]:
        """``{schema, world_size, missing, differences, reports}``; ``reports`` as each rank wrote
        it.

        ``differences`` is a list of ``{what, values: [{value, ranks}]}``.
        """
        return {
            "schema": SCHEMA_VERSION,
            "world_size": self.first.world_size,
            "missing": list(self.missing),
            "differences": [
                {"what": d.what, "values": [{"value": v, "ranks": list(r)} for v, r in d.values]}
                for d in self.differences
            ],
            "reports": [report.to_json() for report in self.reports],
        }


def merge_ranks(reports: Sequence[RunReport]) -> MergedReport:
    """Compare the ranks of one run.

    Compared are graph breaks, graphs, and in each graph the launches, their payloads and the order
    of launches and waits; group names are not, since each rank names the groups that it is in.
    Raises ValueError for no report, two of one rank, or reports of different world sizes.
    """
    if not reports:
        raise ValueError("merge() got no reports. Pass the report of at least one rank.")
    ranks = [report.rank for report in reports]
    twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
    if twice:
        raise ValueError(
            f"merge() got two reports of rank {twice[0]}. They are of different runs, or one file "
            "was read twice; pass one for each rank."
        )
    sizes = sorted({report.world_size for report in reports})
    if len(sizes) > 1:
        raise ValueError(
            f"merge() got reports of runs with {' and '.join(map(str, sizes))} ranks. Pass reports "
            "of one run."
        )
    ordered = tuple(sorted(reports, key=lambda report: report.rank))
    return MergedReport(
        reports=ordered,
        differences=tuple(_differences(ordered)),
        missing=tuple(sorted(set(range(sizes[0])) - set(ranks))),
    )


def _differences(reports: Sequence[RunReport]) -> list[RankDifference]:
    found = [
        _compare(reports, "graph breaks", _breaks, _breaks_text),
        _compare(
            reports, "graphs", lambda r: tuple(title for title, _ in titled(r.graphs)), _titles_text
        ),
        _compare(reports, "topology", lambda r: r.topology, str),
        _compare(reports, "torch", lambda r: r.torch_version, str),
    ]
    graphs: dict[str, dict[int, GraphRecord]] = defaultdict(dict)
    for report in reports:
        for title, graph in titled(report.graphs):
            graphs[title][report.rank] = graph
    for title, by_rank in graphs.items():
        found.append(_sequences(f"{title}: launches", by_rank, _launches))
        found.append(_sequences(f"{title}: payload", by_rank, _payloads))
        found.append(_sequences(f"{title}: order", by_rank, _order))
    return [difference for difference in found if difference is not None]


def _compare(
    reports: Sequence[RunReport],
    what: str,
    value: Callable[[RunReport], Any],
    text: Callable[[Any], str],
) -> RankDifference | None:
    found = _by_value((value(report), report.rank) for report in reports)
    return RankDifference(what, tuple((text(value), r) for value, r in found)) if found else None


def _by_value(values: Iterable[tuple[object, int]]) -> list[tuple[Any, tuple[int, ...]]]:
    """Each value with the ranks that have it, most ranks first; nothing, if all have the same."""
    ranks: dict[Any, list[int]] = defaultdict(list)
    for value, rank in values:
        ranks[value].append(rank)
    ordered = sorted(ranks.items(), key=lambda item: (-len(item[1]), item[1]))
    return [(value, tuple(r)) for value, r in ordered] if len(ordered) > 1 else []


def _sequences(
    what: str,
    by_rank: dict[int, GraphRecord],
    sequence: Callable[[GraphRecord], tuple[str, ...]],
) -> RankDifference | None:
    """Group ranks by equal sequence; show each group by where it first departs from the largest."""
    found = _by_value((sequence(graph), rank) for rank, graph in sorted(by_rank.items()))
    if not found:
        return None
    (most, ranks), *others = found
    places = [_first_difference(most, other) for other, _ in others]
    values = [(_at(most, min(places)), ranks)]
    values += [(_at(other, at), r) for (other, r), at in zip(others, places, strict=True)]
    return RankDifference(what, tuple(values))


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _at(sequence: Sequence[str], index: int) -> str:
    total = f"of {len(sequence)}"
    return f"#{index + 1} {total}: {sequence[index]}" if index < len(sequence) else f"ends {total}"


def _breaks(report: RunReport) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((item.kind, split_line(item.user_line)[0]) for item in report.breaks))


def _breaks_text(breaks: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{kind} at {line}" for kind, line in breaks) or "none"


def _titles_text(titles: Sequence[str]) -> str:
    return f"{count_of(len(titles), 'graph')}: {', '.join(titles)}" if titles else "none"


def _launches(graph: GraphRecord) -> tuple[str, ...]:
    return tuple(f"{c.kind} over {c.group_size}, {c.dtype}" for c in graph.collectives)


def _payloads(graph: GraphRecord) -> tuple[str, ...]:
    return tuple(f"{c.kind} of {c.payload_bytes} bytes" for c in graph.collectives)


def _order(graph: GraphRecord) -> tuple[str, ...]:
    """``launch KIND``, ``wait N``, ``kernel``: without the group's name."""
    return tuple(" ".join(event.split()[:2]) for event in graph.order)
