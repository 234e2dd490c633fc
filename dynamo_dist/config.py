"""The settings that ``enable()`` reads from the environment, once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from dynamo_dist.errors import ConfigError
from inductor_passes.agree.orders import SECONDS, seconds
from inductor_passes.errors import OptionError

TRACKER_NAMES = ("process_group", "device_mesh", "placement")
TRACKERS_OFF = "DYNAMO_DIST_TRACKERS_OFF"
AGREEMENT_SECONDS = SECONDS


def agreement_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds that a rank waits for others to compile the same graph; 0 settles and compares nothing.

    Raises ConfigError for what is no number of at least 0.
    """
    try:
        return seconds(environ)
    except OptionError as error:
        raise ConfigError(error.what, error.why, error.fix) from None


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
