"""Inputs of a graph and the sources that they come from."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._dynamo.symbolic_convert import InstructionTranslator


def inputs_follow(gm: fx.GraphModule) -> bool:
    """Return whether Dynamo will load what placeholders ``gm`` has once the backend is done with it.

    ``OutputGraph.graphargs`` reads them off the graph, which was seen in 2.13 to 2.15.
    """
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # outside of a frame
        return False
    return output.graph is gm.graph and len(output.graphargs) == len(output.placeholders)


def source_of_input(placeholder: fx.Node) -> Any:
    """Return the source from which Dynamo loads an input of its graph; None if it does not say."""
    return getattr(placeholder.meta.get("grapharg"), "source", None)
