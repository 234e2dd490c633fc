"""Compiled graphs call their operators below autograd.

A compiled graph runs where no gradient is recorded, so autograd's kernels of its operators do nothing but
take time: for each functional collective and each wait, several calls of Python functions, which cost as much
again as everything else that the host does for a layer.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from dynamo_dist.torch_compat import dtensor_dispatch, inductor_code
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.lowering.ops import NAMESPACE
from inductor_passes.inductor.session_in_work import has_trait

# A trait of a compile; in option ``disable``: operators keep autograd's kernels.
BELOW_AUTOGRAD = "below_autograd"
_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
# Operators whose autograd kernels record gradients and do nothing else.
_KNOWN = frozenset(("aten", "prims", "inductor", "_c10d_functional", "_dtensor", NAMESPACE))


def below_autograd_changes() -> list[Change]:
    """List the changes that enabling makes; compiles with the trait gain by them."""
    return inductor_code.wrap_compiled_code(_lower)


def _lower(call: Callable[..., Any], source: str) -> Callable[..., Any]:
    if not has_trait(BELOW_AUTOGRAD) or not all(
        namespace in _KNOWN or dtensor_dispatch.is_custom_op(f"{namespace}::{name}")
        for namespace, name in _OPERATOR.findall(source)
    ):
        return call

    @functools.wraps(call)
    def below(*args: Any) -> Any:
        with inductor_code.below_autograd():
            return call(*args)

    return below
