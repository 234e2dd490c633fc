"""Read the settings of ``enable()`` from the environment once, and check torch's version."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import torch

from dynamo_dist.errors import ConfigError, UnsupportedTorchError
from inductor_passes.errors import OptionError
from inductor_passes.plugins import digest_of_sources
from inductor_passes.ranks.coordination import SECONDS, deadline_s

OLDEST = (2, 13)
FIRST_UNTESTED = (2, 16)
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1] - 1}"

_VERSION = re.compile(r"\s*v?(\d+)\.(\d+)")


def parse(version: str) -> tuple[int, int] | None:
    """Major and minor of ``2.13.0+cpu``, ``2.14.0.dev20260301+cu130``, ``2.12.0a0+git1a2b``;
    else None.
    """
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else None


def is_supported(version: str) -> bool:
    """Return whether a torch of this version is among those we support."""
    parsed = parse(version)
    return parsed is not None and OLDEST <= parsed < FIRST_UNTESTED


def check(version: str | None = None) -> None:
    """Raise UnsupportedTorchError unless ``version`` (this process's torch by default) is
    supported.
    """
    if version is None:
        version = torch.__version__
    if not is_supported(version):
        raise UnsupportedTorchError(
            f"dynamo_dist supports {SUPPORTED}, but this is torch {version}.",
            "It changes parts of torch.compile that differ from version to version.",
            f'Install a supported one: pip install "torch>={OLDEST[0]}.{OLDEST[1]},'
            f'<{FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1]}".',
        )


BACKEND = EntryPoint("dynamo_dist", "dynamo_dist.backend:dynamo_dist", "torch_dynamo_backends")
TRACKER_NAMES = ("process_group", "device_mesh", "placement")
TRACKERS_OFF = "DYNAMO_DIST_TRACKERS_OFF"
INDUCTOR = "DYNAMO_DIST_INDUCTOR"
AGREEMENT_SECONDS = SECONDS


def agreement_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds that a rank waits for others to compile the same graph; with 0, ranks
    do not coordinate.

    Raises ConfigError for what is no number of at least 0.
    """
    try:
        return deadline_s(environ)
    except OptionError as error:
        raise ConfigError(error.what, error.why, error.fix) from None


@dataclass(frozen=True, slots=True)
class DistConfig:
    """Settings of one ``enable()``.

    ``trackers_off`` names trackers to leave to upstream, to bisect. ``inductor``: compiles by
    ``backend="inductor"`` are ours too.
    """

    trackers_off: frozenset[str] = frozenset()
    inductor: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(self.trackers_off - set(TRACKER_NAMES)):
            raise ConfigError(
                f"{TRACKERS_OFF} names {', '.join(unknown)}.",
                f"The trackers are {', '.join(TRACKER_NAMES)}.",
                "Correct the name or unset the variable.",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DistConfig:
        """``DYNAMO_DIST_TRACKERS_OFF=process_group,placement`` and ``DYNAMO_DIST_INDUCTOR=1``.

        Raises ConfigError for an unknown name or value.
        """
        given = os.environ if environ is None else environ
        names = given.get(TRACKERS_OFF, "")
        off = frozenset(name.strip() for name in names.split(",") if name.strip())
        if (inductor := given.get(INDUCTOR, "") or "0") not in ("0", "1"):
            raise ConfigError(
                f"{INDUCTOR} is {inductor!r}.",
                'It says whether compiles by backend="inductor" are to be as by '
                'backend="dynamo_dist".',
                "Set it to 1 or 0, or unset it.",
            )
        return cls(off, inductor == "1")


def digest(config: DistConfig) -> str:
    """Twelve hex digits over our sources, ``config`` and torch's version: part of torch's cache
    keys.

    Torch's caches see the graph, not the rules by which it was made; without this a state would be
    served the results of another.
    """
    state = f"{digest_of_sources(__name__)} {sorted(config.trackers_off)} {torch.__version__}"
    return hashlib.sha256(state.encode()).hexdigest()[:12]
