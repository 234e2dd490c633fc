"""DTensor's operators of ``loss_parallel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed.tensor.parallel.loss as _loss
from torch.distributed.tensor import DTensor

enable_loss_ops: Callable[[], None] = vars(_loss)["_enable_custom_loss_ops"]
disable_loss_ops: Callable[[], None] = vars(_loss)["_disable_custom_loss_ops"]


def dtensor_op_handlers() -> dict[Any, Any]:
    """Operators that DTensor's dispatcher hands to a function of its own."""
    return DTensor._op_dispatcher._custom_op_handlers
