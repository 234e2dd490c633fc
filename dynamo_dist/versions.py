"""The torch versions that this package works with."""

from __future__ import annotations

import re

from dynamo_dist.errors import UnsupportedTorchError

OLDEST = (2, 13)
FIRST_UNTESTED = (2, 16)
SUPPORTED = f"torch {OLDEST[0]}.{OLDEST[1]} to {FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1] - 1}"

_VERSION = re.compile(r"\s*v?(\d+)\.(\d+)")


def parse(version: str) -> tuple[int, int] | None:
    """Major and minor of ``2.13.0+cpu``, ``2.14.0.dev20260301+cu130``, ``2.12.0a0+git1a2b``; else None."""
    match = _VERSION.match(version)
    return (int(match[1]), int(match[2])) if match else None


def is_supported(version: str) -> bool:
    """Return whether a torch of this version is among those we support."""
    parsed = parse(version)
    return parsed is not None and OLDEST <= parsed < FIRST_UNTESTED


def check(version: str | None = None) -> None:
    """Raise UnsupportedTorchError unless ``version`` (this process's torch by default) is supported."""
    if version is None:
        import torch

        version = torch.__version__
    if not is_supported(version):
        raise UnsupportedTorchError(
            f"dynamo_dist supports {SUPPORTED}, but this is torch {version}.",
            "It changes parts of torch.compile that differ from version to version.",
            f'Install a supported one: pip install "torch>={OLDEST[0]}.{OLDEST[1]},'
            f'<{FIRST_UNTESTED[0]}.{FIRST_UNTESTED[1]}".',
        )
