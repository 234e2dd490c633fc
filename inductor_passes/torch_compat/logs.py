"""Logs and structured traces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any


def artifact_logger(module: str, artifact: str) -> logging.Logger:
    """The logger that ``TORCH_LOGS=artifact`` sets; the module's own, where torch was not told in time.

    ``getArtifactLogger`` was seen in 2.11 to 2.15.
    """
    from torch._logging import _internal

    try:
        return _internal.getArtifactLogger(module, artifact)
    except ValueError:
        return logging.getLogger(module)


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Hand a text to torch's structured trace, where tlparse finds it. Seen in 2.11 to 2.15."""
    import torch._logging

    structured: Any = getattr(torch._logging, "trace_structured")  # noqa: B009 - not exported
    structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
    )
