"""torch's profiler, of which a process has one: to start a second ends the first without a word, in torch 2.13."""

from __future__ import annotations

import torch


def is_profiling() -> bool:
    """Return whether a profile is being taken. ``torch.autograd._profiler_enabled`` was seen in 2.13; without it, False."""
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return bool(enabled is not None and enabled())
