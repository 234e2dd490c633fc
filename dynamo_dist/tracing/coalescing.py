"""``_coalescing_manager``: the collectives inside become one launch where it closes.

Which manager is open for a group is known while tracing: ``registry`` collects what is called inside and
hands it over at ``close_manager``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.tracing.collectives import (
    coalesced_all_gather,
    coalesced_all_reduce,
    coalesced_reduce_scatter,
)
from dynamo_dist.tracing.functional import Group


class Coalesced:
    """The object that ``with _coalescing_manager() as cm`` gives: the launch's Work if ``async_ops``."""

    def __init__(self) -> None:
        self.works: list[dist.Work] = []

    def append(self, work: dist.Work | None = None) -> None:
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def open_manager(group: Group) -> None:
    """From here on collectives of ``group`` are collected; answered while tracing."""


def close_manager(group: Group, async_ops: bool) -> dist.Work | None:
    """Launch what was collected; answered while tracing."""
    return None


@contextlib.contextmanager
def coalescing_manager(
    group: Group = None, device: torch.device | None = None, async_ops: bool = False
) -> Iterator[Coalesced]:
    """``dist._coalescing_manager``: one launch where the block ends."""
    open_manager(group)
    manager = Coalesced()
    yield manager
    manager.append(close_manager(group, async_ops))


def launch_together(
    kind: str, calls: list[Any], op: str, group: Group, async_op: bool
) -> dist.Work | None:
    """One launch for calls of one kind, each ``(input, output)``."""
    inputs = [call[0] for call in calls]
    outputs = [call[1] for call in calls]
    if kind == "all_reduce":
        return coalesced_all_reduce(inputs, op, group, async_op)
    if kind == "all_gather":
        return coalesced_all_gather(outputs, inputs, group, async_op)
    return coalesced_reduce_scatter(outputs, inputs, op, group, async_op)
