"""Optimizers that were made before their model was sharded: they hold parameters that no module has any more.

``fully_shard`` puts new parameters in place of the old ones, and torch lets a step of the old ones pass without a word.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from dynamo_dist.torch_compat import fsdp
from dynamo_dist.torch_compat.dynamo import modules

log = logging.getLogger(__name__)
_looked_at: WeakSet[Any] = WeakSet()


def warn_of_stale_optimizers(state: Any, root: nn.Module) -> None:
    """Warn, once for a state of FSDP2, of optimizers that hold what were ``root``'s parameters before it was sharded.

    They are told by their parameters: no module holds one of them, and their shapes are those of at least half of the
    root's. Looks at all objects of the process, whence only once.
    """
    if state in _looked_at:
        return
    _looked_at.add(state)
    shapes = Counter(param.shape for param in root.parameters())
    optimizers, owned = _alive()
    for optimizer in optimizers:
        held = [param for group in optimizer.param_groups for param in group["params"]]
        if any(id(param) in owned for param in held):
            continue
        if Counter(param.shape for param in held) <= shapes and 2 * len(held) >= shapes.total() > 0:
            kind = type(optimizer).__name__
            log.warning(
                "%s holds %d parameters that no module has, in the shapes of those of %s: it was made before "
                "fully_shard put others in their place. Its steps change nothing of the model, in eager mode too. "
                "Make it afterwards: %s(model.parameters(), ...).",
                kind,
                len(held),
                type(root).__name__.removeprefix("FSDP"),
                kind,
            )


def _alive() -> tuple[list[Optimizer], set[int]]:
    """All optimizers of this process, and the ids of the parameters that modules hold, sharded or not."""
    optimizers: list[Optimizer] = []
    owned: set[int] = set()
    for each in gc.get_objects():
        kind = type(each)  # isinstance asks the object, and a proxy answers for what it stands for
        if issubclass(kind, Optimizer) and "param_groups" in vars(each):
            optimizers.append(each)
        elif issubclass(kind, nn.Module):
            owned.update(map(id, _parameters(each)))
    return optimizers, owned


def _parameters(module: nn.Module) -> Iterator[torch.Tensor | None]:
    yield from vars(module).get("_parameters", {}).values()
    state = modules.module_state(module)
    if isinstance(state, fsdp.FSDPState):
        yield from fsdp.all_sharded(state)
