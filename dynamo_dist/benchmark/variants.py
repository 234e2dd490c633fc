"""The three ways to run a model, each with the plugin in the state that it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dynamo_dist import activation
from dynamo_dist.benchmark.records import VARIANTS, Simulated
from dynamo_dist.reporting import Collector
from inductor_passes.attach.installed import uninstalled
from inductor_passes.records import GraphRecord

BACKENDS: Mapping[str, str] = {"stock": "inductor", "ours": "dynamo_dist"}


@contextmanager
def plugin_for(variant: str) -> Iterator[None]:
    """The plugin on for ours, truly off for the others, ``install()`` too; afterwards as it was before."""
    if variant not in VARIANTS:
        raise KeyError(f"no variant {variant!r}; there are {', '.join(VARIANTS)}")
    ours = variant == "ours"
    with activation.restored(), contextlib.ExitStack() as stack:
        if ours:
            activation.enable()
        else:
            activation.disable()
            stack.enter_context(uninstalled())
        yield


def compiled(
    model: Callable[..., Any], variant: str, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The model itself for eager, else as a user would compile it. ``options`` go to ours alone.

    Call it, and what it returns, inside ``plugin_for(variant)``. What stock has compiled is not found
    by ours, nor the other way round: Dynamo keeps compiled code by backend. But code that a user
    compiled with the same backend is, so call ``torch.compiler.reset()`` before the first.
    """
    if variant == "eager":
        return model
    if variant == "stock":
        return torch.compile(model, backend=BACKENDS[variant])
    return torch.compile(model, backend=BACKENDS[variant], options=dict(options or {}))


def break_count(collector: Collector) -> int:
    """Graph breaks that a collector saw, each place as often as it was met."""
    return sum(record.count for record in collector.breaks)


def simulated(graphs: list[GraphRecord]) -> Simulated | None:
    """Exposed time summed over the graphs of one step, peak of the largest; None without a graph."""
    if not graphs:
        return None
    return Simulated(
        topology=", ".join(dict.fromkeys(graph.topology for graph in graphs)),
        exposed_us_before=sum(graph.before.exposed_us for graph in graphs),
        exposed_us_after=sum(graph.after.exposed_us for graph in graphs),
        peak_bytes_before=max(graph.before.peak_bytes for graph in graphs),
        peak_bytes_after=max(graph.after.peak_bytes for graph in graphs),
    )
