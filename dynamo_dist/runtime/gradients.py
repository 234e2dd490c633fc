"""Add gradients of a compiled graph straight into the parameters' ``.grad``, or refuse a second
backward.

A compiled graph brings one backward graph, which is no operation that autograd could differentiate.

Upstream wraps each gradient as a DTensor, and autograd then adds it to ``.grad`` by a DTensor
operation of its own. Here backward adds all of them itself, at once and below DTensor, wherever
nobody could tell the difference. Where somebody could (a hook that is given the gradient,
``torch.autograd.grad``, other placements, a tensor that is no leaf), the gradient goes the way it
always went.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from dynamo_dist.errors import DTensorError
from dynamo_dist.runtime.guards import are
from dynamo_dist.torch_compat import aot_gradients, aot_runtime
from dynamo_dist.torch_compat.patching import Patch
from inductor_passes.extension import has_trait


def _refuse() -> NoReturn:
    raise DTensorError(
        "create_graph=True asks for gradients that can be differentiated, through a compiled "
        "function on DTensors.",
        "Its backward is a compiled graph, which has no backward of its own: what would come from "
        "there would be missing.",
        "Call torch.autograd.grad(..., create_graph=True) inside the compiled function, where it "
        "becomes part of the "
        "graph, or leave out create_graph if no gradient of the gradient is needed.",
    )


def double_backward_patches() -> list[Patch]:
    """List the changes to apply while the plugin is enabled."""
    return aot_gradients.on_double_backward(_refuse)


_grad = operator.attrgetter("grad")
_grad_dtype = operator.attrgetter("grad_dtype")
# A trait of a compile; in option ``disable``: gradients stay with autograd.
DIRECT_GRADIENTS = "direct_gradients"


def gradients_patches() -> list[Patch]:
    """List the patches that enabling makes; compiles with the trait gain by them."""
    return aot_gradients.wrap_gradients(_make)


def _make(upstream: aot_runtime.Wrap, layout: aot_gradients.GradientLayout) -> aot_runtime.Wrap:
    return (
        torch.compiler.disable(Gradients(upstream, layout).give)
        if has_trait(DIRECT_GRADIENTS)
        else upstream
    )


class _Learned(NamedTuple):
    """Properties of an output of the backward graph, valid as long as mesh and parameter spec
    are the same.
    """

    mesh: object
    parameter_spec: object  # held, so that its identity is not given to another
    spec: Any
    requires_grad: bool
    dtype: torch.dtype
    fits: bool  # whether the gradient has the parameter's sizes and dtype


class _Usual(NamedTuple):
    """Gradients that were all added, and what could be seen of them then; lists in the same
    order.
    """

    positions: list[int]
    locals: list[int]
    mesh_outputs: list[int]
    absent: list[int]  # outputs that were None
    leaves: tuple[list[int], int]  # ids of parameters, and how many hooks the process had made
    meshes: list[object]
    parameter_specs: list[object]
    specs: list[object]
    dtypes: list[torch.dtype]


class Gradients:
    """From what a backward graph returns to what its autograd node returns.

    ``upstream`` is torch's function that does this.
    """

    def __init__(self, upstream: aot_runtime.Wrap, layout: aot_gradients.GradientLayout) -> None:
        self.upstream, self.layout = upstream, layout
        self.known: dict[int, _Learned] = {}
        self.devices = set[torch.device]()
        # The leaves that had no hooks when the process had made this many.
        self.unhooked: tuple[list[int], int] = ([], -1)
        self.usual: _Usual | None = None

    def give(self, outs: tuple[Any, ...]) -> tuple[Any, ...]:
        """``outs`` are local tensors; the result has DTensors, or None for what is added
        already.
        """
        node = aot_gradients.current_node()
        # With create_graph the gradients need a history; anomaly mode looks at what the node
        # returns.
        if node is None or torch.is_grad_enabled() or torch.is_anomaly_enabled():
            return self.upstream(outs)
        # Autograd leaves out the edges of inputs without gradients, so positions are found by
        # needs_input_grad.
        edges = iter([edge for edge, _ in node.next_functions if edge is not None])
        targets = [next(edges, None) if needs else None for needs in node.needs_input_grad]
        if len(targets) != self.layout.inputs or not all(map(_in_order, self.devices)):
            return self.upstream(outs)
        result: list[Any] = [None] * len(targets)
        for position, index in self.layout.plain:
            result[position] = outs[index]
        with aot_gradients.plain_attributes():
            if self.usual is None or not _add_as_before(self.usual, outs, targets):
                self.usual = None
                self._add_each(outs, targets, result)
        return tuple(result)

    def _add_each(self, outs: tuple[Any, ...], targets: Sequence[Any], result: list[Any]) -> None:
        """Add each gradient that can be; the others are put into ``result``."""
        leaves, known_outputs = self._plain_leaves(targets), self.known
        grads, sums, addends = [], [], []
        usual = True  # so far
        taken = set[int]()  # one tensor may be the gradient of several parameters
        for out in self.layout.wrapped:
            position, local_at, mesh_at, _ = out
            local = outs[local_at]
            if local is None:
                continue
            if id(local) in taken:
                # Adding into one of two parameters' gradients in place would change the other's.
                local = local.clone()
            taken.add(id(local))
            leaf, mesh = leaves[position], outs[mesh_at]
            known = known_outputs.get(position)
            parameter_spec = None if leaf is None else leaf._spec
            if (
                known is None
                or known.mesh is not mesh
                # By identity, which is fast; an equal spec in another object is only learned again.
                or known.parameter_spec is not parameter_spec
            ):
                known = known_outputs[position] = self._learn(out, local, mesh, leaf)
            if (
                known.fits
                and leaf.grad_dtype is known.dtype
                and aot_gradients.all_will_run([targets[position]])
            ):
                grad = leaf.grad
                if grad is None:
                    # What AccumulateGrad would do: it takes a gradient over that nobody else holds.
                    leaf.grad = aot_runtime.dtensor(local, known.spec, requires_grad=False)
                    continue
                if type(grad) is DTensor and (grad._spec is known.spec or grad._spec == known.spec):
                    total = grad._local_tensor
                    # A sum in flight, or a subclass, is left to autograd.
                    if type(total) is torch.Tensor and id(total) not in taken:
                        taken.add(id(total))
                        grads.append(grad)
                        sums.append(total)
                        addends.append(local)
                        continue
            usual = False
            result[position] = aot_runtime.dtensor(
                local, known.spec, requires_grad=known.requires_grad
            )
        if sums:
            torch._foreach_add_(sums, addends)
            # The sums were changed behind the DTensors' back; autograd has to refuse a backward
            # that saved one of them.
            torch.autograd.graph.increment_version(grads)
        if usual:
            self.usual = self._seen(outs, leaves)

    def _plain_leaves(self, targets: Sequence[object]) -> list[Any]:
        """The parameter that each target accumulates for; None where a hook is given the
        gradient.
        """
        leaves = aot_gradients.leaves_of(targets)
        state = list(map(id, leaves)), RemovableHandle.next_id
        # A leaf of which this was true at that count existed then: no other can have its id.
        # The count is of all handles of hooks in the process: while it stands still, nobody has
        # registered one.
        if state != self.unhooked:
            hooked = [
                leaf is not None and aot_gradients.has_hooks(t)
                for leaf, t in zip(leaves, targets, strict=True)
            ]
            if any(hooked):
                return [None if bad else leaf for leaf, bad in zip(leaves, hooked, strict=True)]
            self.unhooked = state
        return leaves

    def _seen(self, outs: tuple[object, ...], leaves: Sequence[object]) -> _Usual:
        added = [out for out in self.layout.wrapped if outs[out.local] is not None]
        known = [self.known[out.position] for out in added]
        return _Usual(
            [out.position for out in added],
            [out.local for out in added],
            [out.mesh for out in added],
            [out.local for out in self.layout.wrapped if outs[out.local] is None],
            ([id(leaves[out.position]) for out in added], self.unhooked[1]),
            [each.mesh for each in known],
            [each.parameter_spec for each in known],
            [each.spec for each in known],
            [each.dtype for each in known],
        )

    def _learn(
        self, out: aot_gradients.WrappedGradient, local: Any, mesh: object, leaf: Any
    ) -> _Learned:
        made = out.unflatten(local, mesh)
        spec = None if leaf is None else leaf._spec
        fits = (
            spec is not None
            and spec.tensor_meta == made._spec.tensor_meta
            and not made.requires_grad
            and _in_order(local.device)
        )
        self.devices.add(local.device)
        return _Learned(mesh, spec, made._spec, made.requires_grad, made.dtype, fits)


def _add_as_before(usual: _Usual, outs: tuple[Any, ...], all_targets: Sequence[object]) -> bool:
    """Add all gradients, if all that decides how is the same objects as before; else False, and
    nothing is done.

    What most steps of a training are. It costs no Python line for each parameter: all lists are
    made in C.
    """
    targets = list(map(all_targets.__getitem__, usual.positions))
    addends = list(map(outs.__getitem__, usual.locals))
    leaves = aot_gradients.all_leaves_of(targets)
    if (
        leaves is None
        # An id stands for the same parameter only while no hook was registered: see
        # ``_plain_leaves``.
        or usual.leaves != (list(map(id, leaves)), RemovableHandle.next_id)
        or not are(usual.meshes, map(outs.__getitem__, usual.mesh_outputs))
        or not are(usual.parameter_specs, map(aot_gradients.spec_of, leaves))
        or not are(usual.dtypes, map(_grad_dtype, leaves))
        # A gradient that was there may be absent now, or the other way round.
        or set(map(type, addends)) != {torch.Tensor}
        or any(outs[at] is not None for at in usual.absent)
        or not aot_gradients.all_will_run(targets)
    ):
        return False
    grads = list(map(_grad, leaves))
    if set(map(type, grads)) == {NoneType}:
        # One tensor as the gradient of two parameters: ``_add_each`` makes a copy.
        if not _are_distinct(addends):
            return False
        for leaf, local, spec in zip(leaves, addends, usual.specs, strict=True):
            leaf.grad = aot_runtime.dtensor(local, spec, requires_grad=False)
        return True
    if set(map(type, grads)) != {DTensor} or not are(
        usual.specs, map(aot_gradients.spec_of, grads)
    ):
        return False
    sums = list(map(aot_gradients.local_of, grads))
    if set(map(type, sums)) != {torch.Tensor} or not _are_distinct(sums + addends):
        return False
    torch._foreach_add_(sums, addends)
    torch.autograd.graph.increment_version(grads)
    return True


def _are_distinct(tensors: list[object]) -> bool:
    return len(set(map(id, tensors))) == len(tensors)


def _in_order(device: torch.device) -> bool:
    """Return whether code that reads ``.grad`` after backward sees work that is queued now.

    Autograd waits for the streams of its accumulators, which may not be the stream of this node.
    """
    if device.type == "cuda":
        # On the default stream, code after backward() is ordered behind this node without an event.
        return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    return device.type == "cpu"
