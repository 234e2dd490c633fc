"""The report on one process's graphs, as plain data: what text, JSON, HTML and trace are made from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.records import GraphRecord

SCHEMA_VERSION = 1
MOST_RANKS = 2**20  # the ranks that gave no report are listed one by one


@dataclass(frozen=True, slots=True)
class GraphsReport:
    """One rank's graphs, and who compiled them. Who knows more of a run derives from it."""

    rank: int = field(default=0, metadata={"minimum": 0, "maximum": MOST_RANKS})
    world_size: int = field(default=1, metadata={"minimum": 1, "maximum": MOST_RANKS})
    torch_version: str = ""
    plugin_version: str = ""
    topology: str = ""
    graphs: tuple[GraphRecord, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {
            "schema": SCHEMA_VERSION,
            **{name: _plain(value) for name, value in values},
        }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, GraphRecord):
        return value.to_json()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]
