"""Random operators in Inductor's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from dynamo_dist.torch_compat.changes import Change, SetItem
from dynamo_dist.torch_compat.dtensor.draws import _DRAWN_BY_SEED, _OfShard


def decompose_for_inductor(operators: Mapping[Any, Any]) -> list[Change]:
    """Each of torch's operators as ``own(shard, ...)`` in a graph, by what Inductor makes of torch's.

    Inductor's draws take a seed, to which the shard's position is added. Not while its ``fallback_random`` is
    set; and what it leaves to torch, on the CPU at least, is called as it is. Imports Inductor's lowering, which
    takes a second. Seen in 2.13 to 2.15.
    """
    from torch._inductor.decomposition import fast_random_decomps
    from torch._inductor.fx_passes import replace_random

    table, aten = fast_random_decomps(), torch.ops.aten
    left = (aten.bernoulli.p, *(getattr(aten.normal, each) for each in aten.normal.overloads()))

    def decomposed(op: Any) -> Callable[..., Any]:
        def drawn(shard: Any, *args: Any, **kwargs: Any) -> Any:
            with _OfShard(shard, operators):
                return table[op](*args, **kwargs)

        return drawn

    return [
        *(
            SetItem(table, own, decomposed(stock))
            for stock, own in operators.items()
            if stock in table and stock not in left and str(stock) not in _DRAWN_BY_SEED
        ),
        *(
            SetItem(
                replace_random.patterns.patterns, ("call_function", own), [_by_seed(stock, own)]
            )
            for stock, own in operators.items()
            if str(stock) in _DRAWN_BY_SEED
        ),
    ]


def _by_seed(stock: Any, own: Any) -> Any:
    from torch._inductor import inductor_prims
    from torch._inductor.pattern_matcher import CallFunctionVarArgs, GraphPatternEntry

    name = stock._schema.name.partition("::")[2]

    def replace(match: Any, shard: Any, *args: Any, **kwargs: Any) -> None:
        device = torch.device(kwargs.get("device") or "cpu")
        dtype = kwargs.get("dtype") or (
            torch.int64 if name == "randint" else torch.get_default_dtype()
        )

        def drawn(shard: Any, *args: Any) -> Any:
            seed = inductor_prims.seed(device) + shard
            if name == "randint":
                return inductor_prims.randint(*args, seed).to(dtype)
            return inductor_prims.random(*args, seed, name).to(dtype)

        match.replace_by_example(drawn, [shard, *args])

    pattern = CallFunctionVarArgs(own)
    return GraphPatternEntry(pattern=pattern, extra_check=lambda match: True, handler=replace)
