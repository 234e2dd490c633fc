"""``backend="inductor"``: what compiles its graphs and reads its options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from inductor_passes.torch_compat import TorchFunction

# What a compile was given beyond Inductor's options, kept on torch's object for it.
_OPTIONS = "dist_options"


@dataclass(frozen=True, slots=True)
class Request:
    """One compile by ``backend="inductor"``: ``own`` and ``inductor`` are its options, of ours and
    of Inductor's.

    ``upstream()`` compiles as torch would. ``region`` names the compile for torch's logs, where it
    has a name.
    """

    gm: fx.GraphModule
    inputs: Sequence[object]
    own: Mapping[str, object]
    inductor: Mapping[str, object]
    upstream: Callable[[], object]
    region: str | None = None


class Taker(Protocol):
    """One that takes the compiles of ``backend="inductor"``."""

    def compile(self, request: Request) -> Any:
        """Compile a graph."""

    def own_options(self, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """Options of one ``torch.compile``: those that are not Inductor's, and those that are.
        Raises for others.
        """


@contextlib.contextmanager
def while_nothing_compiles() -> Iterator[None]:
    """No graph is traced in the block. ``compile_lock`` was seen in 2.11 to 2.15."""
    from torch._dynamo.convert_frame import compile_lock  # loads all of Dynamo

    with compile_lock:
        yield


PLACES = (
    "torch._TorchCompileInductorWrapper.__call__",
    "torch._TorchCompileInductorWrapper.__eq__",
    "torch._TorchCompileInductorWrapper.apply_options",
    "torch._dynamo.backends.registry._COMPILER_FNS['inductor']",
)


def take(taker: Taker) -> Callable[[], None]:
    """Let ``taker`` compile for ``backend="inductor"`` from now on; return the function to undo it.

    The object that ``torch.compile`` makes for each such call keeps its class, which asks the taker
    instead. So does the function registered by that name, for
    ``torch._dynamo.optimize("inductor")``. Ahead-of-time compiles stay torch's. Call it inside
    ``while_nothing_compiles()``. ``_TorchCompileInductorWrapper`` and ``_COMPILER_FNS`` were seen
    in 2.11 to 2.15.
    """
    # Loads all of Dynamo: only who takes the backend over has use for it.
    from torch._dynamo.backends import inductor as _  # noqa: F401 - registers the name
    from torch._dynamo.backends import registry

    owner: Any = torch._TorchCompileInductorWrapper
    table: dict[str, Any] = registry._COMPILER_FNS
    made = {
        "__call__": _asks(taker, owner.__call__),
        "__eq__": _compares(owner.__eq__),
        "apply_options": _reads(taker, owner.apply_options),
    }
    by_name = _by_name(taker, table["inductor"])
    # From ``vars``, so that ``undo`` puts back what was in the class and not a bound method.
    methods, function = {name: vars(owner)[name] for name in made}, table["inductor"]

    def undo() -> None:
        for name, upstream in methods.items():
            setattr(owner, name, upstream)
        table["inductor"] = function

    try:
        for name, value in made.items():
            setattr(owner, name, value)
        table["inductor"] = by_name
    except BaseException:  # Ctrl-C too
        undo()
        raise
    return undo


def _is_ahead_of_time(wrapper: Any) -> bool:
    return bool(wrapper.compiler_name != "inductor")


def _asks(taker: Taker, upstream: TorchFunction) -> TorchFunction:
    @functools.wraps(upstream)
    def call(self: Any, model_: fx.GraphModule, inputs_: Sequence[object], **how: Any) -> object:
        def as_torch() -> object:
            return upstream(self, model_, inputs_, **how)

        # An argument of a later torch that is not known here: torch's own way is right for it.
        if _is_ahead_of_time(self) or how.keys() - {"config_patches"}:
            return as_torch()
        return taker.compile(
            Request(
                model_,
                inputs_,
                getattr(self, _OPTIONS, {}),
                {**self.config, **(how.get("config_patches") or {})},
                as_torch,
                getattr(self, "name", None),
            )
        )

    return call


def _compares(upstream: TorchFunction) -> TorchFunction:
    """Dynamo serves one compile's code to another whose backend is equal: other options are
    another backend.
    """

    @functools.wraps(upstream)
    def equal(self: Any, other: object) -> bool:
        found: bool = upstream(self, other)
        return found and getattr(self, _OPTIONS, {}) == getattr(other, _OPTIONS, {})

    return equal


def _reads(taker: Taker, upstream: TorchFunction) -> TorchFunction:
    @functools.wraps(upstream)
    def apply_options(self: Any, options: Mapping[str, object] | None) -> object:
        if not options or _is_ahead_of_time(self):
            return upstream(self, options)
        own, rest = taker.own_options(options)
        if own:
            setattr(self, _OPTIONS, {**getattr(self, _OPTIONS, {}), **own})
        return upstream(self, rest)

    return apply_options


def _by_name(taker: Taker, upstream: TorchFunction) -> TorchFunction:
    @functools.wraps(upstream)
    def inductor(gm: fx.GraphModule, inputs: Sequence[object], **how: Any) -> object:
        def as_torch() -> object:
            return upstream(gm, inputs, **how)

        if how.keys() - {"config_patches"}:
            return as_torch()
        return taker.compile(Request(gm, inputs, {}, how.get("config_patches") or {}, as_torch))

    return inductor
