"""A DTensor and a plain tensor that share memory, both given to a graph that writes to one.

AOTAutograd looks for memory that plain inputs share, and takes a DTensor's for its own: what is written through one is
not seen through the other.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from dynamo_dist.errors import DTensorError
from dynamo_dist.torch_compat.dtensor_specs import may_overlap

_CALLS = ("call_function", "call_method")


def check(gm: fx.GraphModule) -> None:
    """Raise DTensorError for a graph of Dynamo's that is given such inputs."""
    targets = [each for each in map(_target, gm.graph.nodes) if each is not None]
    if not targets:
        return
    # The stand-ins share memory as the inputs do.
    given = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    plain = [
        each for each in given if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
    ]
    local = [each._local_tensor for each in given if isinstance(each, DTensor)]
    shared = [b for b in local if any(may_overlap(a, b) for a in plain)]
    if any(may_overlap(_local(written), each) for written in targets for each in shared):
        raise DTensorError(
            "A compiled function is given a DTensor and a plain tensor of the same memory, and writes to it.",
            "What is written through one of them would not be seen through the other.",
            "Take the local tensor inside the compiled function, x.to_local(), or give it a copy, local.clone().",
        )


def _target(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a node of Dynamo's writes to."""
    if node.op not in _CALLS or not _writes(node):
        return None
    first = node.args[0] if node.args else None
    value = first.meta.get("example_value") if isinstance(first, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _writes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return (
        name == "setitem"
        or name.startswith(("iadd", "isub", "imul", "itruediv", "ipow"))
        or (name.endswith("_") and not name.endswith("__"))
    )
