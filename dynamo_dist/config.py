"""What ``enable()`` reads from the environment, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_dist.errors import ConfigError

TRACKER_NAMES = ("process_group", "device_mesh", "placement")
TRACKERS_OFF = "DYNAMO_DIST_TRACKERS_OFF"
AGREEMENT_SECONDS = "DYNAMO_DIST_AGREEMENT_SECONDS"


def agreement_seconds(environ: Mapping[str, str] | None = None) -> float:
    """How long a rank waits for others to compile the same graph; 0 turns the comparison off.

    Raises ConfigError for what is no number of at least 0.
    """
    value = (os.environ if environ is None else environ).get(AGREEMENT_SECONDS, "") or "30"
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(
            f"{AGREEMENT_SECONDS} is {value!r}.",
            "It is the time, in seconds, for which a rank waits for others to compile a graph.",
            "Set it to a number of at least 0; 0 turns the comparison of ranks off.",
        )
    return seconds


@dataclass(frozen=True, slots=True)
class DistConfig:
    """Settings of one ``enable()``. ``trackers_off`` names trackers to leave to stock, to bisect."""

    trackers_off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.trackers_off - set(TRACKER_NAMES)):
            raise ConfigError(
                f"{TRACKERS_OFF} names {', '.join(unknown)}.",
                f"The trackers are {', '.join(TRACKER_NAMES)}.",
                "Correct the name or unset the variable.",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DistConfig:
        """``DYNAMO_DIST_TRACKERS_OFF=process_group,placement``; raises ConfigError for an unknown name."""
        value = (os.environ if environ is None else environ).get(TRACKERS_OFF, "")
        return cls(frozenset(name.strip() for name in value.split(",") if name.strip()))
