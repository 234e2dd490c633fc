"""Why a graph was not in a cache: what of its key is not as it was when the same graph was compiled last.

The parts of that key lie beside Inductor's cache, one small file for each graph of a program on each rank.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping

import torch
from torch import fx

from inductor_passes.graph.node_kinds import tensors
from inductor_passes.records import CacheRecord
from inductor_passes.report import recorder
from inductor_passes.torch_compat import c10d, dynamo, inductor

FIRST = "first time"
UNKNOWN = "nothing of its key that is known has changed"


def why_missed(graph: fx.Graph, ours: Mapping[str, str | None], graph_id: str) -> CacheRecord:
    """Compare the key of a graph that is compiled now with that of its last compile, and keep it.

    ``graph``: as our passes get it. ``ours``: what they add to its key; None is what forbids to keep it in a cache.
    ``graph_id``: its name in this process.
    """
    local, remote, off = map(
        inductor.get_config, ("fx_graph_cache", "fx_graph_remote_cache", "force_disable_caches")
    )
    if off or not (local or remote):
        return CacheRecord("off", ("Inductor's cache is off",))
    if without := [name for name, value in ours.items() if value is None]:
        return CacheRecord("off", tuple(f"{name} has no uuid()" for name in without))
    parts = {**ours, **_of_torch(graph)}
    now = {name: _digest(str(value)) for name, value in parts.items()}
    name = _digest(_name(graph_id))
    last = recorder.kept("keys", name)
    recorder.keep("keys", name, now)
    if not isinstance(last, dict):
        return CacheRecord("miss", (FIRST,))
    changed = [name for name in sorted(now.keys() | last) if now.get(name) != last.get(name)]
    return CacheRecord("miss", tuple(changed) or (UNKNOWN,))


def _of_torch(graph: fx.Graph) -> dict[str, str]:
    """Parts of the key that are torch's own."""
    inputs: list[str] = []
    others: list[str] = []
    for node in graph.nodes:
        values = [f"{list(t.shape)} {t.dtype} {t.device}" for t in tensors(node.meta.get("val"))]
        (inputs if node.op == "placeholder" else others).append(f"{node.format_node()} {values}")
    settings = {f"torch._inductor.config.{k}": v for k, v in inductor.values_set().items()}
    return {
        "inputs": "\n".join(inputs),
        "graph": "\n".join(others),
        "cache_key_tag": str(torch.compiler.config.cache_key_tag),
        **settings,
    }


def _name(graph_id: str) -> str:
    """What is the same of a graph in every run of a program, also when its lines or sizes change."""
    function = dynamo.frame_in_work()[1].partition(":")[0]
    rank = c10d.global_rank() if c10d.world_size() else 0
    return f"{sys.argv[:1]} {function} {graph_id} {rank}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
