"""Views of DTensors that leave a compiled function, and outputs where only some have gradients.

Autograd makes them itself, as plain tensors of the global shape, which AOTAutograd refuses where
the backward was traced with a DTensor. A hook before the backward's node sees which gradients are
absent; AOTAutograd then gets local zeros in their place, without communication.

A compiled graph returns a view of an input as a tensor of its own, and AOTAutograd then makes the
alias that eager returns: by ``as_strided`` from the input, which DTensor refuses, and which could
not know a slice from a select anyway. Here the views that led to an output are recorded while
AOTAutograd looks at the program, and replayed on the input at each call, so that autograd and
version counters are eager's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.errors import DTensorError
from dynamo_dist.torch_compat import aot_aliases, aot_runtime, dtensor_dispatch
from dynamo_dist.torch_compat.patching import Patch


class _Absent(threading.local):
    """The makers of the zeros for the absent gradients of the backward that runs in this thread,
    in order.
    """

    makers: Sequence[Callable[[], DTensor]] = ()


_absent = _Absent()


def _watched(forward: Callable[..., object]) -> Callable[..., object]:
    """``forward`` with hooks on the node of its outputs."""

    def call(*args: Any) -> Any:
        outputs = forward(*args)
        if torch.is_grad_enabled():
            _watch(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
        return outputs

    return call


def _watch(outputs: Sequence[object]) -> None:
    made = [o for o in outputs if isinstance(o, DTensor) and o.grad_fn is not None]
    if not made:
        return
    # By output of the node, which is how its prehook counts gradients.
    makers = {o.output_nr: _zeros_like(o) for o in made}

    def before(grads: tuple[torch.Tensor | None, ...]) -> None:
        _absent.makers = [makers[i] for i, grad in enumerate(grads) if grad is None and i in makers]

    def after(*_: object) -> None:
        _absent.makers = ()

    # All outputs of a compiled graph have one node.
    node: Any = made[0].grad_fn
    node.register_prehook(before)
    node.register_hook(after)


def _zeros_like(output: DTensor) -> Callable[[], DTensor]:
    """Makes the gradient, without holding the output. A partial output's gradient is whole on
    each rank.
    """
    mesh, shape, stride = output.device_mesh, output.shape, output.stride()
    size, dtype, device = output._local_tensor.shape, output.dtype, output.device
    placements = [Replicate() if p.is_partial() else p for p in output.placements]

    def make() -> DTensor:
        zeros = torch.zeros(size, dtype=dtype, device=device)
        return DTensor.from_local(
            zeros, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return make


def _absent_gradient(tangent: torch.Tensor, expected: object) -> torch.Tensor | None:
    """Zeros as the backward was traced with, for a plain tensor that stands for an absent
    gradient.
    """
    zeros = [make() for make in _absent.makers]
    alike = [zero for zero in zeros if zero.shape == tangent.shape and zero.dtype == tangent.dtype]
    # Several absent gradients may be of one shape: the one with the expected layout comes first.
    alike.sort(key=lambda zero: zero.__tensor_flatten__()[1] != expected)
    return alike[0] if alike else None


def unused_outputs_patches() -> list[Patch]:
    """List the patches that enabling makes for outputs that no loss uses."""
    return [
        *aot_runtime.on_forward_with_tangents(DTensor, _watched),
        *aot_runtime.on_plain_tangent(DTensor, _absent_gradient),
    ]


@dataclass(frozen=True, slots=True)
class Symbolic:
    """An argument that depends on a dynamic size: an expression in the sizes' symbols."""

    expression: Any


@dataclass(frozen=True, slots=True)
class ViewStep:
    """One view: an operator by name, its arguments after the tensor, and which of its results."""

    name: str
    overload: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    result: int | None


@dataclass(frozen=True, slots=True)
class Views:
    """The views from a base to an output; ``known`` holds sizes as expressions (``_known_sizes``).

    Takes the place of AOTAutograd's record for plain tensors, and is pickled with its cache
    entries.
    """

    steps: tuple[ViewStep, ...]
    known: tuple[Any, ...]
    sequence: tuple[()] = ()  # AOTAutograd looks here for its own views


@dataclass(frozen=True, slots=True)
class LocalViews:
    """The same for outputs without autograd history: the views of the local tensor, as torch
    records them.
    """

    views: object
    sequence: tuple[()] = ()


def record(args: Sequence[Any], outputs: Sequence[Any]) -> tuple[list[object], list[object]]:
    """The outputs, and for each the way from its base to it or None.

    ``args`` and ``outputs`` are those of the program that AOTAutograd looks at. An output whose
    local tensor shares no memory with an input's, because the view had to communicate, is no alias:
    it is made one tensor of its own, and so is a view of a DTensor made inside that is no output
    itself.
    """
    locals_of_args = {
        aot_aliases.storage_key(arg._local_tensor) for arg in args if isinstance(arg, DTensor)
    }
    found, ways = [], []
    for output in outputs:
        way = None
        # An argument that is returned as it is needs no view.
        if isinstance(output, DTensor) and not any(output is arg for arg in args):
            base = output._base
            shares_input = aot_aliases.storage_key(output._local_tensor) in locals_of_args
            if any(base is arg for arg in args):
                alias = shares_input
            else:  # AOTAutograd refuses to return a base that the program does not
                # By identity: ``in`` would compare tensors by element.
                alias = any(base is other for other in outputs)
            if base is not None and not alias:
                output, base = apart(output), None
            way = _way(output, base, shares_input)
        found.append(output)
        ways.append(way)
    return found, ways


def apart(output: torch.Tensor) -> torch.Tensor:
    """The same values and memory, to autograd a tensor of its own."""
    # To autograd the result of _unsafe_view is no view, and it moves no data.
    return torch.ops.aten._unsafe_view(output, output.shape)


def apart_if_made_here(args: Sequence[object], outputs: Sequence[object]) -> list[object]:
    """Outputs whose base is no argument, each apart; the others as they are."""
    return [
        apart(output)
        if isinstance(output, torch.Tensor)
        and output._base is not None
        and not any(output._base is arg for arg in args)
        else output
        for output in outputs
    ]


def _way(output: DTensor, base: torch.Tensor | None, shares_input: bool) -> Any:
    steps = _steps(output, base) if isinstance(base, DTensor) else None
    if base is not None and steps is not None:
        return Views(steps, tuple(map(_symbolic, _known_sizes(base, output))))
    if output.requires_grad or not shares_input:
        return None
    views = aot_aliases.local_views(output._local_tensor)
    return None if views is None else LocalViews(views)


def _steps(output: DTensor, base: DTensor) -> tuple[ViewStep, ...] | None:
    """List the steps that autograd recorded from base to output; None if they are no chain of
    one tensor's views.
    """
    replayed, calls = aot_aliases.recorded_views(output, base)
    # Autograd has kept no way, or one from another shape: nothing to rely on.
    if replayed is None or replayed.shape != output.shape:
        return None
    steps = []
    current: Any = base
    for position, (function, args, kwargs, result) in enumerate(calls):
        rest = (args[1:], kwargs)
        # A step that takes other tensors cannot be repeated from its arguments alone.
        if not args or args[0] is not current or aot_aliases.has_tensors(rest):
            return None
        index = None
        if isinstance(result, (list, tuple)):
            last = position + 1 == len(calls)
            wanted = replayed if last else calls[position + 1][1][0]
            # split and its like give several views; only one of them leads on.
            index = next((i for i, each in enumerate(result) if each is wanted), None)
            if index is None:
                return None
        packed_args, packed_kwargs = dtensor_dispatch.tree_map(_symbolic, rest)
        steps.append(
            ViewStep(
                function._schema.name,
                function._overloadname,
                tuple(packed_args),
                tuple(sorted(packed_kwargs.items())),
                index,
            )
        )
        current = result if index is None else result[index]
    return tuple(steps) if current is replayed else None


def _symbolic(value: object) -> object:
    return Symbolic(value.node.expr) if isinstance(value, torch.SymInt) else value


def _known_sizes(base: torch.Tensor, output: torch.Tensor) -> tuple[object, ...]:
    """Global sizes of both, and the base's local ones: often a global size is so many times a
    local one.
    """
    local = base._local_tensor.shape if isinstance(base, DTensor) else ()
    return (*base.shape, *output.shape, *local)


def replay(
    way: object, base: torch.Tensor, target: torch.Tensor, requires_grad: bool
) -> torch.Tensor:
    """The alias of ``base`` that eager returns, with the global shape and placements of ``target``.

    ``target`` is what the compiled graph returned. Raises DTensorError if there is no way from base
    to target, or none that is known for these sizes.
    """
    if isinstance(way, LocalViews):
        assert isinstance(base, DTensor) and isinstance(target, DTensor)
        local = aot_aliases.apply_local_views(base._local_tensor, way.views)
        return DTensor(local, target._spec, requires_grad=False)
    if not isinstance(way, Views):
        raise _unknown(base, target)
    values = _values(way, base, target)
    found: Any = base
    for step in way.steps:
        args, kwargs = dtensor_dispatch.tree_map(
            lambda value: _value(value, values, base, target), (step.args, dict(step.kwargs))
        )
        found = aot_aliases.overload(step.name, step.overload)(found, *args, **kwargs)
        if step.result is not None:
            found = found[step.result]
    if found.shape != target.shape:
        raise _unknown(base, target)
    # The graph was compiled for an output without gradients, as under no_grad().
    if base.requires_grad and not requires_grad:
        return found.detach()
    if requires_grad and not base.requires_grad:
        found.requires_grad_(True)
    return found


def _values(way: Views, base: torch.Tensor, target: torch.Tensor) -> Mapping[object, object]:
    """Map each symbol to its value in this call, as far as one of the sizes is that symbol
    alone.
    """
    return {
        known.expression: size
        for known, size in zip(way.known, _known_sizes(base, target), strict=True)
        if isinstance(known, Symbolic) and known.expression.is_Symbol
    }


def _value(
    value: Any, values: Mapping[Any, Any], base: torch.Tensor, target: torch.Tensor
) -> object:
    if not isinstance(value, Symbolic):
        return value
    if value.expression in values:
        return values[value.expression]
    # Known symbols may still give a number where the expression is no single size.
    found = value.expression.subs(values)
    if not found.is_number:
        raise _unknown(base, target)
    return int(found)


def _unknown(base: torch.Tensor, target: torch.Tensor) -> DTensorError:
    return DTensorError(
        f"A compiled function returns a view of a DTensor, global shape {tuple(target.shape)} of "
        f"{tuple(base.shape)}, and how it was made is not known.",
        "The output must share memory with its base, and only the recorded views can tell how.",
        "Return a copy instead, y.clone(), or take the view outside the compiled function.",
    )


def views_patches() -> list[Patch]:
    """List the patches that enabling makes for views."""
    return aot_aliases.on_output_aliases(record, replay, apart_if_made_here, DTensor)
