"""Masks of row-sharded embeddings, one for each trace."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer

from dynamo_dist.torch_compat.changes import Change, SetAttribute


def masks_per_trace() -> list[Change]:
    """Let each trace, and eager mode, have its own mask of what a row-sharded embedding looked up.

    The mask stands in a placement that the cache of sharding decisions hands out again, until the result
    is reduced. A result that never was left its mask to the next trace, which compared it with its own and
    stopped. Eager mode's waits aside meanwhile. Seen in 2.11 to 2.15.
    """
    materialize, release = MaskBuffer.materialize_mask, MaskBuffer.release_mask

    @functools.wraps(materialize)
    def materializing(self: Any, mask: torch.Tensor) -> None:
        trace, before = _this_trace(), getattr(self, "trace", None)
        if self.refcount and trace != before:
            if before is None:
                self.eager = self.data, self.refcount
            self.data, self.refcount = None, 0
            if trace is None:
                _give_back(self)
        self.trace = trace
        materialize(self, mask)

    @functools.wraps(release)
    def releasing(self: Any) -> None:
        release(self)
        if not self.refcount:
            _give_back(self)

    return [
        SetAttribute(MaskBuffer, materialize.__name__, materializing),
        SetAttribute(MaskBuffer, release.__name__, releasing),
    ]


def _give_back(buffer: Any) -> None:
    buffer.data, buffer.refcount = vars(buffer).pop("eager", (None, 0))
    buffer.trace = None


def _this_trace() -> int | None:
    """Return a number that tells one look at a program from another; None in eager mode."""
    functional = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    mode = functional or detect_fake_mode()
    return None if mode is None else id(mode)
