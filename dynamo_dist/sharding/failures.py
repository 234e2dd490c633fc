"""Errors inside strategies: torch's leave a call undecided, ours are raised.

An error of ours could be answered by gathering too, with right numbers. It would stay hidden then, and
cost a collective and memory on every call; raised, it names what to report and how to go on without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import shapes_and_placements, tensor_strategies
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

# What a strategy says when it does not decide, and what sizes that are not known yet make of it.
UNDECIDED = (
    NotImplementedError,
    Decompose,
    StrategyError,
    dtensor_specs.GuardOnDataDependentSymNode,
)


def of_torch(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """``decide`` of torch, whose errors say that it does not know the layout."""

    def undecided(schema: dtensor_specs.OpSchema, error: Exception) -> Exception:
        return NotImplementedError(f"torch's strategy of {schema.op}: {error}")

    return _asked(decide, undecided)


def of_ours(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """``decide`` of ours; raises StrategyError with operator, layouts and strategy where it fails."""

    def failure(schema: dtensor_specs.OpSchema, error: Exception) -> Exception:
        specs = [each.strategies[0].output_spec for each in tensor_strategies(schema)]
        return StrategyError(
            f"{decide.__module__}.{decide.__qualname__}, which decides for {schema.op}, failed for "
            f"{shapes_and_placements(specs)}: {error!r}.",
            "This is an error in dynamo_dist.",
            "Report it with this message. To go on, redistribute the arguments to Replicate first, "
            "or register a strategy with dynamo_dist.sharding.register_strategy.",
        )

    return _asked(decide, failure)


def _asked(
    decide: dtensor_dispatch.Strategy,
    described: Callable[[dtensor_specs.OpSchema, Exception], Exception],
) -> dtensor_dispatch.Strategy:
    @functools.wraps(decide)
    def asked(schema: dtensor_specs.OpSchema) -> Any:
        try:
            return decide(schema)
        except UNDECIDED:
            raise
        except Exception as error:
            raise described(schema, error) from error

    return asked
