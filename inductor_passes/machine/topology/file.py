"""Reading a topology's JSON strictly: every mistake names file, field, value and the fix.

A file is one object::

    {"name": "...", "description": "...", "ranks_per_node": FIGURE,
     "device": {"matmul": {DTYPE: {"peak_tflops": FIGURE, "efficiency": FIGURE}, ...},
                "attention_efficiency": FIGURE, "memory_gb_per_s": FIGURE, "kernel_us": FIGURE,
                "compute_stretch": FIGURE, "launching_us": FIGURE,
                "measured_products": [{"dtype": "bfloat16", "source": "...",
                                       "points": [[BATCH, M, K, N, MICROSECONDS], ...]}, ...]},
     "links": {"intra_node_gb_per_s": FIGURE, "inter_node_gb_per_s": FIGURE,
               "protocols": [{"name": "...", "launch_us": FIGURE,
                              "intra_node": {"step_us": FIGURE, "bandwidth_share": FIGURE},
                              "inter_node": {"step_us": FIGURE, "bandwidth_share": FIGURE}}, ...],
               "all_reduce_in_node": {"launch_us": FIGURE, "gb_per_s": FIGURE},
               "coalesced_start_share": FIGURE, "reduce_scatter_rounds": FIGURE,
               "measured": [{"kind": "all_gather", "ranks": 8, "nodes": 1, "source": "...",
                             "points": [[PAYLOAD_BYTES, MICROSECONDS], ...]}, ...]}}

where FIGURE is ``{"value": NUMBER, "source": "where the number is from"}``; ``compute_stretch``, ``launching_us``,
``all_reduce_in_node``, ``coalesced_start_share``, ``reduce_scatter_rounds`` and both lists of what was measured may be left out. A payload is one rank's
input. ``data/cpu-gloo.json`` is a short one to start from; ``python -m inductor_passes costs import``
adds measurements to one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from inductor_passes.errors import TopologyError
from inductor_passes.files import Form, parsed
from inductor_passes.files.check import MOST


def form(fix: str) -> Form:
    """The format, for the reader of all formats; ``Section`` is its schema."""
    return Form("topology", TopologyError, fix)


class Section:
    """One JSON object of the file, read field by field; ``finish`` refuses what was not read."""

    def __init__(self, data: Any, path: str, file: str, fix: str, sources: dict[str, str]) -> None:
        self._path, self._file, self._fix, self._sources = path, file, fix, sources
        if not isinstance(data, dict):
            raise self._error(path, data, "must be an object")
        self._data: dict[str, Any] = data
        self._read: set[str] = set()

    @classmethod
    def of_text(cls, content: str, file: str, fix: str) -> Section:
        """The top of a file. Raises TopologyError if ``content`` is not JSON or repeats a key."""
        return cls(parsed(content, file, form(fix)), "", file, fix, {})

    def sources(self) -> tuple[tuple[str, str], ...]:
        """Path and source of every figure read so far, in the order of reading."""
        return tuple(self._sources.items())

    def section(self, name: str) -> Section:
        """A nested object."""
        return self._child(self._get(name), self._join(name))

    def optional_section(self, name: str) -> Section | None:
        """A nested object, or None if the file has none."""
        self._read.add(name)
        return self.section(name) if name in self._data else None

    def named_sections(self) -> Iterator[tuple[str, Section]]:
        """Every entry of an object whose keys are free names."""
        for name in self._data:
            yield name, self.section(name)

    def entries(self, name: str) -> Iterator[Section]:
        """The objects of a list that is not empty."""
        items = self._get(name)
        if not isinstance(items, list) or not items:
            raise self._error(self._join(name), items, "must be a list of at least one object")
        for index, item in enumerate(items):
            yield self._child(item, f"{self._join(name)}[{index}]")

    def optional_entries(self, name: str) -> Iterator[Section]:
        """The same; none if the file has no such list."""
        self._read.add(name)
        return self.entries(name) if name in self._data else iter(())

    def rows(self, name: str, width: int) -> list[list[float]]:
        """A list of at least one row: whole numbers of at least 0, then one finite number above it."""
        rows = self._get(name)
        rule = f"must be rows of {width - 1} whole numbers of at least 0 and one number above it"
        if not isinstance(rows, list) or not rows:
            raise self._error(self._join(name), rows, rule)
        for i, row in enumerate(rows):
            good = isinstance(row, list) and len(row) == width and all(map(_is_amount, row))
            if not good or not row[-1] > 0 or any(type(value) is not int for value in row[:-1]):
                raise self._error(f"{self._join(name)}[{i}]", row, rule)
        return rows

    def whole(self, name: str) -> int:
        """A plain whole number of at least one."""
        value = self._get(name)
        if type(value) is not int or not 1 <= value <= MOST:
            raise self._error(self._join(name), value, "must be a whole number of at least 1")
        return value

    def finish_measured(self) -> None:
        """Note the source of a list of measurements; nothing else may be there."""
        self._sources[self._path] = self.text("source")
        self.finish()

    def twice(self, what: str) -> TopologyError:
        """The error for measurements that are there already."""
        return TopologyError(
            f"Topology file {self._file!r}: {self._path!r} has the {what} of an entry before it.",
            "Only one of the two could count.",
            f"Put their points in one entry. {self._fix}",
        )

    def text(self, name: str) -> str:
        """A string that is not empty."""
        value = self._get(name)
        if not isinstance(value, str) or not value.strip():
            raise self._error(self._join(name), value, "must be a string that is not empty")
        return value

    def rate(self, name: str) -> float:
        """A figure: finite and above zero."""
        return self._figure(name, math.inf, "must be a finite number above zero")

    def optional_rate(self, name: str) -> float:
        """A figure above zero; 0.0 if the file has none."""
        self._read.add(name)
        return self.rate(name) if name in self._data else 0.0

    def share(self, name: str) -> float:
        """A figure above zero and at most one."""
        return self._figure(name, 1.0, "must be above zero and at most 1")

    def optional_share(self, name: str) -> float:
        """A figure above zero and at most one; 0.0 if the file has none."""
        self._read.add(name)
        return self.share(name) if name in self._data else 0.0

    def optional_multiple(self, name: str) -> float:
        """A figure of at least one; 1.0 if the file has none."""
        self._read.add(name)
        if name not in self._data:
            return 1.0
        value = self._figure(name, math.inf, rule := "must be a finite number of at least 1")
        if value < 1.0:
            raise self._error(self._join(name) + ".value", value, rule)
        return value

    def count(self, name: str) -> int:
        """A figure that is a whole number of at least one."""
        value = self._figure(name, math.inf, "must be a whole number of at least 1")
        if value != int(value):
            raise self._error(self._join(name), value, "must be a whole number of at least 1")
        return int(value)

    def missing(self, name: str) -> TopologyError:
        """The error for a field that is not there."""
        return TopologyError(
            f"Topology file {self._file!r} lacks the field {self._join(name)!r}.",
            "Without it no time can be predicted.",
            f"Add it. {self._fix}",
        )

    def finish(self) -> None:
        """Raise TopologyError for a key that nothing has read: most often a typing mistake."""
        unknown = [key for key in self._data if key not in self._read]
        if unknown:
            raise TopologyError(
                f"Topology file {self._file!r} has an unknown field {self._join(unknown[0])!r}.",
                f"Known here: {', '.join(sorted(self._read))}.",
                f"Correct or remove it. {self._fix}",
            )

    def _figure(self, name: str, most: float, rule: str) -> float:
        figure = self._child(self._get(name), self._join(name))
        value, source = figure._get("value"), figure.text("source")
        figure.finish()
        if not _is_amount(value) or not 0 < value <= most:
            raise self._error(self._join(name) + ".value", value, rule)
        self._sources[self._join(name)] = source
        return float(value)

    def _get(self, name: str) -> Any:
        if name not in self._data:
            raise self.missing(name)
        self._read.add(name)
        return self._data[name]

    def _child(self, data: Any, path: str) -> Section:
        return Section(data, path, self._file, self._fix, self._sources)

    def _join(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def _error(self, path: str, value: Any, rule: str) -> Exception:
        return form(self._fix).wrong(self._file, (path,) if path else (), value, rule)


def _is_amount(value: Any) -> bool:
    # bool is an int to Python, and json reads NaN, Infinity and whole numbers of any length.
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 <= value <= MOST


def dump_topology(value: Any, indent: int = 0) -> str:
    """A topology's content as JSON with one line per figure and per row of measurements."""
    pad = "  " * indent
    if isinstance(value, dict) and set(value) != {"value", "source"}:
        items = [
            f"{pad}  {json.dumps(k)}: {dump_topology(v, indent + 1)}" for k, v in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [f"{pad}  {dump_topology(item, indent + 1)}" for item in value]
        return "[\n" + ",\n".join(items) + f"\n{pad}]"
    return json.dumps(value)
