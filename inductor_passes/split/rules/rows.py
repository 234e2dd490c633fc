"""Rows of routed values: a part has them in an order of its own, and brings them back by itself.

Sorted by expert, the rows of a part are no stretch of the sorted whole, and no join makes the whole
of them. But each row of the whole is one row of one part, and values with equal ``Rows`` hold the
same row at the same place, in a part as in the whole. So what works row by row, on any of them,
works in parts, until rows are put where they came from.

Of that, two things have to follow from the graph alone: where an index points (``Routed.points``),
and that the sizes by which rows are exchanged are counts of the keys by which they were sorted
(``KeyCounts``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import fx


@dataclass(frozen=True, slots=True)
class Base:
    """``size`` rows in the order of the whole, in parts like ``Cut(_, outer)``."""

    size: int
    outer: int = 1


@dataclass(frozen=True, slots=True)
class Sorted:
    """Describe rows of ``of``, sorted by ``keys``, a value with one key for each row.

    Two sorts by equal keys give the same order. ``by``: the counts whose runs the keys name, where
    that is known.
    """

    keys: fx.Node
    of: Rows
    descending: bool = False
    by: KeyCounts | None = None


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Rows that the ranks of a group sent here, by rank, each rank's in the order of ``of``
    there.
    """

    of: Sorted
    group: str


@dataclass(frozen=True, slots=True)
class Run:
    """Describe the rows that ``counts`` counts, which are adjacent in ``of``."""

    counts: KeyCounts
    of: Rows | None = field(default=None, compare=False)


Number = Base | Exchanged | Run


@dataclass(frozen=True, slots=True)
class Alike:
    """Rows that are equal to each other, as many as there are of ``count``."""

    count: Number


Rows = Base | Sorted | Exchanged | Run | Alike


def count_of(rows: Rows) -> Number:
    """Return the base, exchange or run that determines how many rows there are."""
    if isinstance(rows, Sorted):
        return count_of(rows.of)
    return rows.count if isinstance(rows, Alike) else rows


def keys_behind(rows: Rows | None) -> fx.Node | None:
    """Return the keys of the first sort that led to rows; None for those in the order of the
    whole.
    """
    found = None
    while rows is not None and not isinstance(rows, Base):
        if isinstance(rows, Sorted):
            found = rows.keys
        if isinstance(rows, Run):
            rows = rows.counts.rows
        else:
            rows = rows.count if isinstance(rows, Alike) else rows.of
    return found


@dataclass(frozen=True, slots=True)
class Routed:
    """Describe a value whose dimension ``dim`` is rows in a chunk's own order.

    ``points``: its numbers are indices into these rows; in a chunk, into the chunk's rows.
    ``permutes``: each index occurs once. ``by``: keys of a sort that rows in the order of the whole
    went through, and whose symbols are in its sizes. ``labels``: each number names the run of these
    counts that its row belongs to.
    """

    dim: int
    rows: Rows
    points: Rows | None = None
    permutes: bool = False
    by: fx.Node | None = None
    labels: KeyCounts | None = None

    def at(self, dim: int) -> Routed:
        """Return the same rows along another dimension."""
        return replace(self, dim=dim)

    def moved(self, by: int) -> Routed:
        """Return the same rows, ``by`` dimensions further."""
        return self.at(self.dim + by)

    def plain(self) -> Routed:
        """Return the same rows of numbers that are no places."""
        return replace(self, points=None, permutes=False, labels=None)

    @property
    def keys(self) -> fx.Node | None:
        """Keys of the sort that it depends on."""
        return keys_behind(self.rows) or keys_behind(self.points) or self.by

    def __str__(self) -> str:
        return f"dimension {self.dim} by token"


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """How many rows of ``of`` have keys of each of ``groups`` equal runs of keys, in order; or of
    those numbered ``at``.

    With a ``group`` each of its ranks sent the counts of an equal share of the runs, in order of
    the ranks. ``every``: of all ranks' runs those are counted together that have the same number in
    a share; there are ``groups`` of them.
    """

    keys: fx.Node
    of: Rows
    groups: int
    group: str = ""
    at: tuple[int, ...] | None = None
    every: bool = False

    @property
    def rows(self) -> Sorted | Exchanged:
        """Return the rows that are counted, in the order of their runs."""
        here = Sorted(self.keys, self.of)
        return Exchanged(here, self.group) if self.group else here

    @property
    def total(self) -> Number | None:
        """What they are the number of, if all runs are counted together."""
        are_all = self.at is not None and sorted(self.at) == list(range(self.groups))
        return count_of(self.rows) if are_all else None

    def has_shape(self, shape: tuple[object, ...]) -> bool:
        """Return whether a value of this shape has one count of each run."""
        return self.at is None and shape == (self.groups,)

    def are_in(self, rows: Rows) -> bool:
        """Return whether rows lie run after run, in the order in which they are counted."""
        if isinstance(rows, Sorted) and rows.by is not None and rows.by == self:
            return True
        same = self.rows
        if isinstance(rows, Sorted):
            rows = Sorted(rows.keys, rows.of, rows.descending)
        return not self.every and rows == same


@dataclass(frozen=True, slots=True)
class Addends:
    """Describe whole numbers that are the sum of one addend from each chunk.

    ``counts``: what they count, where that is known. ``ends``: what they count together with all
    runs before it. ``total``: the rows whose number is a size, where it is one. ``joins``: whether
    there is a sum that others may read; if not, they read the addend of a chunk. ``by``: keys of
    the sort that they depend on.
    """

    counts: KeyCounts | None = None
    total: Number | None = None
    joins: bool = True
    by: fx.Node | None = None
    ends: KeyCounts | None = None

    @property
    def keys(self) -> fx.Node | None:
        """Keys of the sort that it depends on."""
        counts = self.counts or self.ends
        return (keys_behind(counts.rows) if counts is not None else None) or self.by

    def __str__(self) -> str:
        return "counts"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition that holds for each part."""

    def __str__(self) -> str:
        return "a condition"
