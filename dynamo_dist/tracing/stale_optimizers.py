"""Optimizers that were made before their model was sharded: they hold parameters that no module has any more.

``fully_shard`` puts new parameters in place of the old ones, and torch lets a step of the old ones pass without a word.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from dynamo_dist.torch_compat import dynamo_modules, fsdp

_Kind = TypeVar("_Kind")
log = logging.getLogger(__name__)
_looked_at: WeakSet[Any] = WeakSet()


def warn_of_stale_optimizers(state: Any, root: nn.Module) -> None:
    """Warn, once for a state of FSDP2, of optimizers that hold what were ``root``'s parameters before it was sharded.

    They are told by their parameters: no module holds one of them, and their shapes are those of at least half of the
    root's. Looks at all objects of the process, whence only once, and at modules only where an optimizer may be one.
    """
    if state in _looked_at:
        return
    _looked_at.add(state)
    own = {id(param) for param in root.parameters()}
    shapes = Counter(param.shape for param in root.parameters())
    suspects = []
    for optimizer in _alive(Optimizer):
        held = [p for group in vars(optimizer).get("param_groups", ()) for p in group["params"]]
        found = Counter(param.shape for param in held)
        if (
            own.isdisjoint(map(id, held))
            and found <= shapes
            and 2 * len(held) >= shapes.total() > 0
        ):
            suspects.append((optimizer, held))
    if not suspects:
        return
    owned = {id(param) for module in _alive(nn.Module) for param in _parameters(module)}
    for optimizer, held in suspects:
        if owned.isdisjoint(map(id, held)):
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


def _alive(kind: type[_Kind]) -> list[_Kind]:
    """All objects of this process that are of a type; isinstance asks the object, and a proxy answers for another."""
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _parameters(module: nn.Module) -> Iterator[torch.Tensor | None]:
    yield from vars(module).get("_parameters", {}).values()
    state = dynamo_modules.module_state(module)
    if isinstance(state, fsdp.FSDPState):
        yield from fsdp.all_sharded(state)
