"""Trace a graph by AOTAutograd without compiling it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def decompositions() -> Mapping[Any, Any]:
    """Inductor's table."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def trace_only(gm: Any, inputs: Any) -> None:
    """Let AOTAutograd trace forward and backward, and stop before anything is compiled."""
    from torch._dynamo.backends.common import aot_autograd

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _Traced

    try:
        aot_autograd(
            fw_compiler=stop,
            bw_compiler=stop,
            inference_compiler=stop,
            partition_fn=stop,
            decompositions=decompositions(),
        )(gm, inputs)
    except _Traced:
        return


class _Traced(Exception):
    pass
