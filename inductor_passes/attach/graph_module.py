"""The passes as one function of a graph module, for compilers that take lists of such functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from inductor_passes.attach.hooks import Attachment
from inductor_passes.attach.installed import checked
from inductor_passes.errors import OptionError, PreconditionError
from inductor_passes.pass_options import split
from inductor_passes.reporting import reporters
from inductor_passes.torch_compat import tracing

PHASES = ("forward", "backward", "inference")


def communication_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    options: Mapping[str, Any] | None = None,
    phase: str = "inference",
) -> fx.GraphModule:
    """Run the passes on a functional graph of aten operators and functional collectives, in place, and return it.

    ``(gm, example_inputs) -> gm``, as torchtitan's graph trainer takes it; ``functools.partial`` gives it ``options``,
    ours (``PassOptions``) alone. The graph runs in the order that it then has: as it is, or by a backend that keeps
    the order. Where Inductor compiles it next, hand ``inductor_passes.options()`` to Inductor instead, which pins
    the order. ``example_inputs``, real or fake, local shapes, are needed where nodes have no ``meta["val"]``.
    ``phase``, for the report: ``forward``, ``backward``, or ``inference`` for a graph of both or of neither.

    The ranks of a job settle the order as they do in a compile, so each calls it for its own graph. A graph is named
    ``fx0``, ``fx1``, ... in reports, as this process comes to it, if it is not of a compile by Dynamo.

    Raises OptionError for an option that is not ours, PreconditionError for a graph without values, GroupError for a
    launch on a process group that does not exist, and what a failing pass raises.
    """
    own, _ = split(checked(options or {}, "communication_pass()"))
    if phase not in PHASES:
        raise OptionError(
            f"communication_pass() got the phase {phase!r}.", "", f"It is one of {PHASES}."
        )
    _complete(gm, example_inputs)
    reporters.start(own.report)
    Attachment(own).improve(gm.graph, phase, lowers=False)
    gm.recompile()
    return gm


def _complete(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Give nodes their values where they lack them."""
    without = [n for n in gm.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    if not without:
        return
    wanted = len(gm.graph.find_nodes(op="placeholder"))
    if len(inputs) != wanted:
        raise PreconditionError(
            f"communication_pass() got a graph whose node %{without[0].name} has no meta['val'], and "
            f"{len(inputs)} example inputs for {wanted} inputs of the graph.",
            "Bytes and durations are read off the values of nodes.",
            "Trace with make_fx(..., tracing_mode='fake'), or pass one example input for each graph input.",
        )
    tracing.propagate_shapes(gm, inputs)
