"""The function by which ``nested_compile_region`` calls what it marks, seen in 2.13 to 2.15."""

from __future__ import annotations

from dynamo_dist.torch_compat.probing import _optional

CALL = _optional("torch._higher_order_ops.invoke_subgraph", "invoke_subgraph_placeholder")
