"""A DTensor and a plain tensor that share memory, both given to a graph that writes to one.

AOTAutograd looks for memory that plain inputs share, and takes a DTensor's for its own: what is written through one is
not seen through the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from dynamo_dist.errors import DTensorError
from dynamo_dist.torch_compat.overlap import may_overlap


def check(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Raise DTensorError for such inputs."""
    plain = [
        each for each in inputs if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
    ]
    local = [each._local_tensor for each in inputs if isinstance(each, DTensor)]
    if any(may_overlap(a, b) for a in plain for b in local) and _writes(gm):
        raise DTensorError(
            "A compiled function is given a DTensor and a plain tensor of the same memory, and writes to a tensor.",
            "What is written through one of them would not be seen through the other.",
            "Take the local tensor inside the compiled function, x.to_local(), or give it a copy, local.clone().",
        )


def _writes(gm: fx.GraphModule) -> bool:
    names = (
        getattr(node.target, "__name__", str(node.target))
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method")
    )
    return any(
        name == "setitem"
        or name.startswith(("iadd", "isub", "imul", "itruediv", "ipow"))
        or (name.endswith("_") and not name.endswith("__"))
        for name in names
    )
