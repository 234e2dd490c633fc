"""Options of the scheduler that a user may set: ``options={"schedule": {...}}``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from inductor_passes.errors import OptionError


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of the scheduler: what a schedule may cost.

    extra_memory_ratio, extra_memory_bytes: peak memory may exceed that of the program's own order
        by the larger of this share of it and this many bytes. None: by what FSDP2's own runtime
        would exceed it where the graph gathers for its modules, else 1 GiB.
    bucket: whether launches may be merged.
    """

    extra_memory_ratio: float = 0.05
    extra_memory_bytes: int | None = None
    bucket: bool = True

    def __post_init__(self) -> None:
        for key in ("extra_memory_ratio", "extra_memory_bytes"):
            value = getattr(self, key)
            if key == "extra_memory_bytes" and value is None:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise _bad(key, value, "a number of at least 0")
        if not isinstance(self.bucket, bool):
            raise _bad("bucket", self.bucket, "True or False")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ScheduleOptions:
        """From a user's mapping; what it leaves out keeps its default."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise OptionError(
                    f"Option 'schedule' has an unknown key {key!r}.",
                    "",
                    f"Known are {', '.join(known)}.",
                )
        return cls(**given)


def _bad(key: str, value: object, wanted: str) -> OptionError:
    return OptionError(f"Option 'schedule' has {key} = {value!r}.", "", f"It takes {wanted}.")
