"""Interface of every cost model: how long a node computes, how long a collective holds its link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import fx

# Key of a node's meta: the predicted time of a fused kernel, which holds communication inside.
PREDICTED_US = "inductor_passes_predicted_us"


@runtime_checkable
class CostModel(Protocol):
    """Predicted durations in microseconds for the nodes of one post-grad graph.

    Every rank of a program must get the same answers, or ranks schedule differently and hang: a model
    may read shapes, dtypes, the topology file, and the size and stride of a group; never this process's
    own rank, a clock or a benchmark. Predictions are made before launches are pinned in place.
    """

    @property
    def name(self) -> str:
        """For reports: the topology's name."""

    def compute_us(self, node: fx.Node) -> float:
        """Time on the compute stream; 0.0 for placeholders, views, launches, waits and outputs."""

    def launch_us(self, launch: fx.Node) -> float:
        """Time that one collective holds its channel, from its start until its result is there."""

    def link_us(self, launch: fx.Node, payload_bytes: Sequence[float]) -> float:
        """The same for a launch like this one with other payloads; several are one coalesced call."""

    @property
    def copy_bytes_per_us(self) -> float:
        """Rate at which buckets are packed and unpacked, over bytes read plus bytes written."""

    @property
    def compute_stretch(self) -> float:
        """Factor on a kernel's time while a collective is on its way; 1.0: none is slowed."""

    def digest(self) -> str:
        """A stable hash of everything that changes a prediction; part of the cache key."""


def launching_us(cost: CostModel) -> float:
    """Processor time that each launch takes of what computes; 0 where a model has no such figure."""
    return float(getattr(cost, "launching_us", 0.0))
