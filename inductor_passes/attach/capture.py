"""The graphs that passes would see, without compiling them: seconds instead of minutes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_passes.torch_compat import aot, tracing
from inductor_passes.torch_compat import inductor as inductor_compat
from inductor_passes.torch_compat import sizes as sizes_compat


@dataclass(frozen=True, slots=True)
class Captured:
    """One graph; ``phase`` is ``forward``, ``backward`` or ``inference``."""

    phase: str
    graph: fx.Graph


@contextlib.contextmanager
def capturing(
    patches: Mapping[str, Any] | None = None,
) -> Iterator[tuple[Callable[..., Any], list[Captured]]]:
    """A backend for ``torch.compile``, and the list of graphs that it fills, in the order of compiling.

    Graphs stand where Inductor calls our passes: after AOTAutograd and stock's own passes. A function
    so compiled returns tensors of the right shapes with nothing in them, so use it on a fake group.
    ``patches``: Inductor's configuration, such as ``options()`` makes.
    """
    found: list[Captured] = []

    def inner(gm: fx.GraphModule, inputs: Any, **how: Any) -> Callable[..., Any]:
        is_inference = bool(how.get("is_inference"))
        phase = "inference" if is_inference else "backward" if how.get("is_backward") else "forward"
        outputs = gm.graph.output_node().args[0]
        assert isinstance(outputs, (list, tuple))
        values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in outputs]
        tracing.post_grad_until_ours(gm, inputs, is_inference)
        found.append(Captured(phase, gm.graph))

        def run(_: Any) -> list[Any]:
            return [_empty(value) for value in values]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        with aot.backward_at_once():
            return inductor_compat.compile_fx(gm, inputs, inner, dict(patches or {}))

    yield backend, found


def _empty(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = (
        [sizes_compat.size_hint(i) for i in what] for what in (value.shape, value.stride())
    )
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
