"""Changes of placement, noted on the nodes that they make."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.fx.proxy as fx_proxy
import torch.fx.traceback as fx_traceback

from dynamo_dist.torch_compat.changes import Change, Made, WrapAttribute


def redistribute_changes(describe: Callable[[Any, Any, str], str], field: str) -> list[Change]:
    """Have every node that a DTensor's redistribution traces bear ``describe(from, to, op)`` as ``meta[field]``.

    A conjugation or negation that is only noted on a local tensor is done before it is sent: products, copies and views
    take such tensors as they are, and c10d then refuses them.

    ``from`` and ``to`` are DTensorSpecs; ``op`` is the operator that wants its input so, "" where the
    program redistributes. ``torch.fx.proxy._COPY_META_FIELDS`` names what is handed on from graph to graph;
    a field of our own leaves ``meta["custom"]`` to whoever annotates a program. That list,
    ``redistribute_local_tensor``, ``OpDispatcher.redistribute_local_args`` and
    ``torch.fx.traceback.current_meta`` were seen in 2.13 to 2.15.
    """
    from torch.distributed.tensor import _api, _dispatch, _redistribute

    asking: contextvars.ContextVar[str] = contextvars.ContextVar("asking", default="")

    def annotated(stock: Any) -> Any:
        @functools.wraps(stock)
        def redistribute_local_tensor(local: Any, current: Any, target: Any, **how: Any) -> Any:
            # Asked first: an exported program would name both, whether there is something to do or not.
            if local.is_conj() or local.is_neg():
                local = local.resolve_conj().resolve_neg()
            if not fx_traceback.has_preserved_node_meta():
                return stock(local, current, target, **how)
            with _noted(field, describe(current, target, asking.get())):
                return stock(local, current, target, **how)

        return redistribute_local_tensor

    def asked(stock: Any) -> Any:
        function = getattr(stock, "__func__", stock)

        @functools.wraps(function)
        def redistribute_local_args(op_info: Any, schema: Any, *rest: Any, **how: Any) -> Any:
            if not fx_traceback.has_preserved_node_meta():
                return function(op_info, schema, *rest, **how)
            token = asking.set(str(getattr(schema, "op", "")))
            try:
                return function(op_info, schema, *rest, **how)
            finally:
                asking.reset(token)

        return staticmethod(redistribute_local_args)

    name = "redistribute_local_tensor"
    return [
        *(WrapAttribute(module, name, annotated) for module in (_api, _dispatch, _redistribute)),
        WrapAttribute(_dispatch.OpDispatcher, "redistribute_local_args", asked),
        MetaField(field),
    ]


class MetaField(Made):
    """Have nodes hand on ``meta[field]`` to those that are traced from them."""

    def __init__(self, field: str) -> None:
        self._field = field

    def apply(self) -> None:
        fx_proxy._COPY_META_FIELDS.append(self._field)

    def undo(self) -> None:
        fx_proxy._COPY_META_FIELDS.remove(self._field)


@contextlib.contextmanager
def _noted(field: str, value: str) -> Iterator[None]:
    """Nodes made in this block bear ``value``."""
    meta = fx_traceback.current_meta
    before = meta.get(field)
    meta[field] = value
    try:
        yield
    finally:
        if before is None:
            del meta[field]
        else:
            meta[field] = before
