"""Run the passes on graph modules, without a compile or in other compilers' lists of passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_passes.errors import OptionError, PreconditionError
from inductor_passes.inductor.hooks import Attachment
from inductor_passes.inductor.installed import checked
from inductor_passes.pass_options import split
from inductor_passes.report import report
from inductor_passes.torch_compat import aot, inductor, nodes


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph; ``phase`` is ``forward``, ``backward`` or ``inference``."""

    phase: str
    graph: fx.Graph


@contextlib.contextmanager
def capturing(
    patches: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Callable[..., Any], list[Captured]]]:
    """A backend for ``torch.compile``, and the list of graphs that it fills, in the order of
    compiling.

    Graphs stand where Inductor calls our passes: after AOTAutograd and upstream's own passes. A
    function so compiled returns tensors of the right shapes with nothing in them, so use it on a
    fake group.
    ``patches``: Inductor's configuration, such as ``options()`` makes.
    """
    found: list[Captured] = []

    def inner(gm: fx.GraphModule, inputs: Any, **how: Any) -> Callable[..., Any]:
        is_inference = bool(how.get("is_inference"))
        phase = "inference" if is_inference else "backward" if how.get("is_backward") else "forward"
        outputs = gm.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
        aot.post_grad_until_ours(gm, inputs, is_inference)
        found.append(Captured(phase, gm.graph))

        def run(_: Any) -> list[Any]:
            return [_empty(value) for value in values]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with aot.backward_at_once():
            return inductor.compile_fx(gm, inputs, inner, dict(patches or {}))

    yield backend, found


def _empty(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = ([nodes.size_hint(i) for i in what] for what in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


PHASES = ("forward", "backward", "inference")


def communication_pass(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any] = (),
    *,
    options: Mapping[str, Any] | None = None,
    phase: str = "inference",
) -> fx.GraphModule:
    """Run the passes in place on a functional graph, and return it.

    ``(gm, example_inputs) -> gm``, as torchtitan's graph trainer takes it. The graph holds aten
    operators and functional collectives. ``functools.partial`` gives it ``options``, ours
    (``PassOptions``) alone. The graph then runs in the order that it has: as it is, or by a backend
    that keeps the order. Where Inductor compiles it next, hand ``inductor_passes.options()`` to
    Inductor instead, which pins the order. ``example_inputs``, real or fake, local shapes, are
    needed where nodes have no ``meta["val"]``. ``phase``, for the report: ``forward``,
    ``backward``, or ``inference`` for a graph of both or of neither.

    The ranks of a job agree on the order as they do in a compile, so each calls it for its own
    graph. A graph of a compile by Dynamo has that compile's name in reports. Any other is named
    ``fx0``, ``fx1``, ... in the order in which this process gets them.

    Raises OptionError for an option that is not ours, PreconditionError for a graph without values,
    GroupError for a launch on a process group that does not exist, and what a failing pass raises.
    """
    own, _ = split(checked(options or {}, "communication_pass()"))
    if phase not in PHASES:
        raise OptionError(
            f"communication_pass() got the phase {phase!r}.", "", f"It is one of {PHASES}."
        )
    _complete(gm, example_inputs)
    report.start(own.report)
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
            f"communication_pass() got a graph whose node %{without[0].name} has no meta['val'], "
            f"and {len(inputs)} example inputs for {wanted} inputs of the graph.",
            "Bytes and durations are read off the values of nodes.",
            "Trace with make_fx(..., tracing_mode='fake'), or pass one example input for each "
            "graph input.",
        )
    aot.propagate_shapes(gm, inputs)
