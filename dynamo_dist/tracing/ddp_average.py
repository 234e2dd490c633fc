"""DDP's average of gradients as operations of a backward graph, with the meaning of its reducer.

The reducer averages what has been accumulated in ``.grad`` once a backward is through: what a graph
produced, what other uses of a parameter added, what micro-batches under ``no_sync()`` left. A graph
launches its averages before that, so it takes what is in ``.grad`` along at the launch.

Autograd runs a parameter's accumulation node after all of its uses. A graph that read the parameter
itself would be one of them, and what the others contribute would come too late. So graphs read a
leaf beside it, with the same storage and an accumulation node of its own; when the backward ends,
the averages move from the leaves to the parameters.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from dynamo_dist.errors import DataParallelError
from dynamo_dist.torch_compat import aot_gradients

_ops = torch.ops._c10d_functional
_data_ptr = torch.Tensor.data_ptr
_requires_grad = operator.attrgetter("requires_grad")
# What an error says of a gradient that comes once the average is launched.
_LATE = (
    "A DDP parameter of shape {shape} got a gradient from outside of the compiled forward after "
    "the average was launched."
)
_WHY_LATE = (
    "What was computed from it before the forward comes through backward after the forward's graph."
)
_FIX_LATE = (
    "Compute it after the call of the DDP module, or compile what DDP wraps: "
    "DistributedDataParallel(torch.compile(module))."
)
_averagings: weakref.WeakValueDictionary[str, Averaging] = weakref.WeakValueDictionary()


class Averaging:
    """The parameters of one DDP module, the leaves that graphs read in their place, and the state
    of a backward.

    ``key`` names it in graphs; it is the same in another process that runs the same program.
    ``registered`` has each dictionary of parameters that holds one, its name and its place.
    ``buckets`` are of places. Where ranks may use other parameters each, a graph also reads the
    leaf of ``used``: its gradient says which of a bucket any rank has used.
    """

    def __init__(
        self,
        key: str,
        params: Sequence[nn.Parameter],
        registered: Sequence[tuple[dict[str, Any], str, int]],
        buckets: Sequence[Sequence[int]],
    ) -> None:
        self.key, self.params = key, list(params)
        self.registered = list(registered)
        self.buckets = list(buckets)
        self.leaves = [_leaf(param) for param in self.params]
        self.used = [self._used_leaf(bucket) for bucket in buckets]
        self._storages = list(map(_data_ptr, self.params))
        self._is_expected = False  # a forward that synchronises has run since the last backward
        self._backward = -1  # autograd's number of the backward that is under way
        self._synchronizes = False  # whether the gradients of that backward are averaged
        _averagings[key] = self

    def _used_leaf(self, bucket: Sequence[int]) -> tuple[Sequence[int], torch.Tensor]:
        return bucket, self.params[bucket[0]].new_zeros(len(bucket)).detach().requires_grad_()

    def expect(self) -> None:
        """Average the gradients of the next backward, as after a forward without ``no_sync()``."""
        self._is_expected = True

    def refresh(self) -> tuple[bool, ...]:
        """Follow parameters to new storages; return which are registered and require gradients,
        by place.
        """
        storages = list(map(_data_ptr, self.params))
        if storages != self._storages:
            for leaf, param in zip(self.leaves, self.params, strict=True):
                # A program may give a parameter new storage; graphs read the leaf, which must
                # follow.
                leaf.data = param.data
            self._storages = storages
        is_in_place = [table.get(name) is self.params[i] for table, name, i in self.registered]
        return (*is_in_place, *map(_requires_grad, self.params))

    def take(self, flat: torch.Tensor, places: Sequence[int], used: Sequence[int]) -> None:
        """Add to the local gradients, concatenated in ``flat``, what parameters have accumulated.

        Those of ``used`` places come from this backward: as in autograd, hooks of the parameter see
        them first. After the gradients, ``flat`` may have a number for each place, which is not
        zero if it is used; it is set where something has been accumulated. A backward that no
        forward prepared for, such as the second through a graph that was kept, is not averaged: its
        gradients stay here, and zeros go on.
        """
        backward = aot_gradients.current_backward()
        if backward != self._backward:
            self._backward = backward
            # Only the first backward after a forward averages: a second one through a kept graph
            # finds the flag cleared.
            self._synchronizes, self._is_expected = self._is_expected, False
            # Queued at the first bucket, so it runs once for a backward of many buckets.
            aot_gradients.call_after_backward(self._finish)
        start, had = 0, list[int]()
        for place in places:
            param = self.params[place]
            end = start + param.numel()
            # Otherwise the local gradient is all there is, and it lies in ``flat`` already.
            if param.grad is not None or param._backward_hooks or not self._synchronizes:
                if param.grad is not None:
                    had.append(place)
                self._take_one(flat[start:end].view(param.shape), param, place in used)
            start = end
        if len(flat) > start:
            for place in had:
                # What was accumulated under ``no_sync()`` counts as a use, or its average would be
                # dropped as unused.
                flat[start + places.index(place)] = 1

    def _take_one(self, local: torch.Tensor, param: nn.Parameter, is_used: bool) -> None:
        hooks = param._backward_hooks if is_used else None
        for hook in tuple((hooks or {}).values()):
            # Hooks may keep the gradient, and ``flat`` is written to afterwards.
            replaced = hook(local.clone())
            if replaced is not None:
                local.copy_(replaced)
        if not self._synchronizes:
            if is_used:
                param.grad = local.clone() if param.grad is None else param.grad.add_(local)
            # The collective runs nevertheless: other ranks launch it too, as the graph is the same.
            local.zero_()
        elif param.grad is not None:
            local.add_(param.grad)
            # It is part of the average now; ``_finish`` sets the result.
            param.grad = None

    def _finish(self) -> None:
        """Move averages to the parameters, at the end of the backward."""
        unused = self._unused()
        for place, (param, leaf) in enumerate(zip(self.params, self.leaves, strict=True)):
            average, leaf.grad = leaf.grad, None
            if not self._synchronizes or not param.requires_grad or place in unused:
                continue
            if param.grad is not None:
                raise DataParallelError(
                    _LATE.format(shape=tuple(param.shape)), _WHY_LATE, _FIX_LATE
                )
            param.grad = average

    def _unused(self) -> set[int]:
        """Return places whose parameters no rank has used, as the averages of the backward say."""
        found = set[int]()
        for places, leaf in self.used:
            if leaf.grad is not None:
                found.update(
                    place
                    for place, sum_ in zip(places, leaf.grad.tolist(), strict=True)
                    if not sum_
                )
                leaf.grad = None
        return found


def _leaf(param: nn.Parameter) -> torch.Tensor:
    return param.detach().requires_grad_(param.requires_grad)


def buckets(params: Sequence[torch.Tensor], capacities: Sequence[int]) -> list[list[int]]:
    """Split places of parameters into DDP's buckets: the last parameters first, one dtype and
    device in each.

    A bucket is closed when it holds its capacity in bytes; ``capacities`` are those of the first
    buckets, and the last of them is that of all others.
    """
    found: list[list[int]] = []
    opened: dict[object, tuple[list[int], int]] = {}
    closed = 0
    for place in reversed(range(len(params))):
        param = params[place]
        kind = param.dtype, param.device
        if kind not in opened:
            opened[kind] = [], 0
            found.append(opened[kind][0])
        bucket, size = opened[kind]
        bucket.append(place)
        size += param.numel() * param.element_size()
        opened[kind] = bucket, size
        if size >= capacities[min(closed, len(capacities) - 1)]:
            del opened[kind]
            closed += 1
    return found


class _Averaged(torch.autograd.Function):
    """Pass parameters through as they are; backward averages their gradients in one collective.

    With ``used``, a leaf, each rank may use different parameters. The collective then has all of
    the bucket, followed by flags that say which ones are used. One more output then is a number
    without meaning, which has to be attached to what forward returns.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: str,
        size: int,
        key: str,
        places: Sequence[int],
        used: torch.Tensor | None,
        *params: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # An absent gradient is known by None: DDP leaves out parameters that are not used.
        ctx.set_materialize_grads(False)
        ctx.launch = group, size, key, tuple(places), used is not None
        ctx.like = [(param.shape, param.dtype, param.device) for param in params]
        # Views: autograd treats an input that a function returns as it is differently.
        passed = tuple(param.view_as(param) for param in params)
        return passed if used is None else (*passed, used.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[object, ...]:
        group, size, key, places, may_differ = ctx.launch
        grads = grads[: len(places)]
        have = [grad is not None for grad in grads]
        if may_differ:
            given = [
                torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
                for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
            ]
            in_launch = [True] * len(places)
        else:
            # A parameter that got no gradient is left out: DDP would wait for it, and say so in the
            # next forward.
            given = [grad for grad in grads if grad is not None]
            in_launch = have
        if not given:
            return (None,) * (5 + len(places))
        flat = [grad.reshape(-1) for grad in given]
        if may_differ:
            flat.append(flat[0].new_tensor([float(each) for each in have]))
        joined = torch.cat(flat)
        if key:
            launched = [place for place, each in zip(places, in_launch, strict=True) if each]
            used = [place for place, each in zip(places, have, strict=True) if each]
            torch.ops.dynamo_dist_parallel.take_(joined, key, launched, used)
        # Scaled before the sum, by a product, as DDP's reducer does it: results agree to the bit.
        total = _ops.wait_tensor(_ops.all_reduce(joined * (1 / size), "sum", group))
        parts = iter(total.split([len(each) for each in flat]))
        means = [
            next(parts).view(shape) if each else None
            for each, (shape, _, _) in zip(in_launch, ctx.like, strict=True)
        ]
        return (None,) * 4 + (next(parts) if may_differ else None, *means)


class _Attached(torch.autograd.Function):
    """Pass a tensor through; its backward also runs that of the operators that gave ``tokens``."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.tokens = [(token.dtype, token.device) for token in tokens]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grad, *(torch.zeros((), dtype=dtype, device=device) for dtype, device in ctx.tokens)


_library = torch.library.Library("dynamo_dist_parallel", "FRAGMENT")
_library.define(
    "averaged(Tensor[] params, Tensor? used, str group, int group_size, str key, int[] places) -> "
    "Tensor[]"
)
_library.define("attached(Tensor output, Tensor[] tokens) -> Tensor")
_library.define(
    "take_(Tensor(a!) flat, str key, int[] places, int[] used) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),
)


def _averaged(
    params: Sequence[torch.Tensor],
    used: torch.Tensor | None,
    group: str,
    group_size: int,
    key: str,
    places: Sequence[int],
) -> list[torch.Tensor]:
    return list(_Averaged.apply(group, group_size, key, tuple(places), used, *params))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _take(flat: torch.Tensor, key: str, places: Sequence[int], used: Sequence[int]) -> None:
    _averagings[key].take(flat, places, used)


def _traced_take(flat: torch.Tensor, key: str, places: Sequence[int], used: Sequence[int]) -> None:
    """Nothing: gradients are taken in a backward alone."""


_library.impl("averaged", _averaged, "CompositeImplicitAutograd")
_library.impl(
    "attached", lambda output, tokens: _Attached.apply(output, *tokens), "CompositeImplicitAutograd"
)
_library.impl("take_", _take, "CompositeExplicitAutograd")
torch.library.register_fake("dynamo_dist_parallel::take_", _traced_take, lib=_library)
