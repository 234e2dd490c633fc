"""What is otherwise in a graph's schedule because of measured costs, in words."""

from __future__ import annotations

from collections.abc import Sequence

from inductor_passes.records import GraphRecord


def is_changed(before: Sequence[GraphRecord], after: Sequence[GraphRecord]) -> bool:
    """Return whether a graph of ``after`` launches, waits or computes in another order than before, or was not there."""
    old = {_key(record): record for record in before}
    return any(
        (was := old.get(_key(new))) is None
        or was.order != new.order
        or _payloads(was) != _payloads(new)
        or _parts(was) != _parts(new)
        for new in after
    )


def changes(before: Sequence[GraphRecord], after: Sequence[GraphRecord]) -> tuple[str, ...]:
    """One line for each graph of ``after``, by the record that it had before; others are left out."""
    old = {_key(record): record for record in before}
    lines = []
    for new in after:
        was = old.get(_key(new))
        if was is not None:
            lines.append(f"{new.phase}: {'; '.join(_changes(was, new)) or 'nothing'}")
    return tuple(lines)


def _changes(was: GraphRecord, new: GraphRecord) -> list[str]:
    found = []
    (count_was, size_was), (count, size) = _launches(was), _launches(new)
    if count_was != count:
        found.append(
            f"{count} launches instead of {count_was}, the largest of {size} bytes instead of {size_was}"
        )
    else:
        moved = sum(a != b for a, b in zip(_places(was), _places(new), strict=True))
        if moved:
            found.append(f"{moved} of {count} launches and their waits stand behind other products")
    if (parts := _parts(new)) != _parts(was):
        found.append(f"cut into {parts} parts instead of {_parts(was)}")
    if found:
        found.append(
            f"exposed {new.after.exposed_us:.0f} us by measured costs"
            + (f", {new.predicted.exposed_us:.0f} by the topology's" if new.predicted else "")
        )
    return found


def _key(record: GraphRecord) -> tuple[str, str, str]:
    return record.place, record.phase, record.graph


def _payloads(record: GraphRecord) -> list[int]:
    return [collective.payload_bytes for collective in record.collectives]


def _launches(record: GraphRecord) -> tuple[int, int]:
    sizes = _payloads(record)
    return len(sizes), max(sizes, default=0)


def _places(record: GraphRecord) -> list[tuple[int, ...]]:
    """Of each launch, how many products stand before it and before its waits."""
    found: list[list[int]] = []
    kernels = 0
    for event in record.order:
        if event == "kernel":
            kernels += 1
        elif event.startswith("launch"):
            found.append([kernels])
        else:
            found[int(event.split()[1])].append(kernels)
    return [tuple(places) for places in found]


def _parts(record: GraphRecord) -> int:
    return record.split.parts if record.split is not None else 1
