"""The only file that names private torch parts for this package, each behind a feature probe."""

from __future__ import annotations

import torch


def size_hint(size: int | torch.SymInt) -> int:
    """An int as it is; of a symbolic size the value seen while tracing (1 if there is none).

    Seen in torch 2.11 to 2.15.
    """
    if isinstance(size, int):
        return size
    hint = getattr(size.node, "hint", None)
    return int(hint) if hint is not None else 1
