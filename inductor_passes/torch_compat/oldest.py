"""For torch 2.11 and 2.12 alone: passes that are not told whether a graph is for inference.

Without them this file goes, and what calls it: passes then derive from ``CustomInferenceAwareGraphPass`` and are told.
Elsewhere ``call_pass`` (``inductor.py``) then no longer asks whether torch has that class.
"""

from __future__ import annotations

from inductor_passes.torch_compat.dynamo import graph_being_compiled


def pass_base() -> type:
    """The class to derive an Inductor graph pass from, told whether the graph is for inference.

    ``CustomInferenceAwareGraphPass`` was seen in 2.13 and 2.15; 2.11 has ``CustomGraphPass`` only.
    """
    from torch._inductor import custom_graph_pass

    return getattr(
        custom_graph_pass, "CustomInferenceAwareGraphPass", custom_graph_pass.CustomGraphPass
    )


def is_inference(told: bool | None) -> bool:
    """Return whether Inductor compiles for inference; torch 2.11 does not say it to passes, but to the graph's name."""
    return "inference" in graph_being_compiled() if told is None else told
