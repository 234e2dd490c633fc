"""The passes in every compile by ``backend="inductor"``, for programs that cannot name a backend
of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from inductor_passes.errors import OptionError
from inductor_passes.inductor.local_graphs import is_plain
from inductor_passes.inductor.options import taken_off
from inductor_passes.inductor.session import CompileSession
from inductor_passes.pass_options import PassOptions, own_keys, split
from inductor_passes.report import report
from inductor_passes.torch_compat import backend
from inductor_passes.torch_compat.backend import Request

# Compiles a graph as ``CompileSession`` does, with its name in torch's logs.
Compile = Callable[[fx.GraphModule, Any, PassOptions, Mapping[str, Any], str | None], Any]


USER = "install()"


@dataclass(frozen=True)
class Part:
    """One owner's part in ``backend="inductor"``.

    ``options``: ours, for compiles that are given no other. ``compile_graph``: compiles a graph
    that may communicate; None: with the passes alone.
    """

    options: Mapping[str, Any]
    compile_graph: Compile | None = None


_parts: dict[str, Part] = {}
_undo: Callable[[], None] | None = None


def install(given: Mapping[str, Any] | None = None, /, **more: Any) -> None:
    """Let ``backend="inductor"`` use the passes in this process, from the next graph that is
    compiled on.

    ``torch.compile(model)`` and ``torch.compile(model, backend="inductor", mode=..., options=...)``
    then compile as with ``compile_with_passes``, also where a library calls them; ``options`` may
    name ours (``PassOptions``) beside Inductor's. ``given`` and ``more`` are ours for compiles that
    name none of them. What was compiled before stays as it is; graphs that cannot communicate are
    compiled by torch alone, with its cache entries.

    Called again, the later options hold; one ``uninstall()`` undoes all calls. Raises OptionError,
    naming the known ones, for an option that is not ours, and TopologyError for a bad topology.
    """
    put(USER, Part(checked({**(given or {}), **more}, "install()")))


def uninstall() -> None:
    """Let ``backend="inductor"`` be as before ``install()``, exactly; without it nothing happens.

    Code that was compiled in between stays, and runs; what is compiled anew is compiled by torch
    alone.
    """
    put(USER, None)


def checked(options: Mapping[str, Any], asked: str) -> dict[str, Any]:
    """Options for all compiles. Raises OptionError, naming ``asked``, for one that is not ours,
    TopologyError.
    """
    ours = own_keys()
    if others := [key for key in options if key not in ours]:
        raise OptionError(
            f"{asked} got the option {others[0]!r}.",
            f"It takes the passes' own options: {', '.join(ours)}.",
            "Set Inductor's in torch._inductor.config, or in the options of one torch.compile.",
        )
    split(options)
    return dict(options)


def put(owner: str, part: Part | None) -> None:
    """Replace an owner's part by another, or remove it if ``part`` is None."""
    if part is None and owner not in _parts:
        return
    parts = {name: each for name, each in _parts.items() if name != owner}
    _set(parts if part is None else {**parts, owner: part})


@contextlib.contextmanager
def uninstalled() -> Iterator[None]:
    """``backend="inductor"`` is torch's alone in the block."""
    before = _parts
    _set({})
    try:
        yield
    finally:
        _set(before)


def _set(parts: dict[str, Part]) -> None:
    global _parts, _undo  # noqa: PLW0603 - what is installed is one thing of the process
    if not parts and not _parts:
        return
    with backend.while_nothing_compiles():
        if _undo is None:
            _undo = backend.take(_Taker())
        _parts = parts
        if not parts:
            _undo()
            _undo = None


class _Taker:
    """Compiles as all parts together say; as torch does if there are none, should torch still
    come here.
    """

    def own_options(self, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
        if not _parts:
            return {}, dict(options)
        split(options)
        ours = own_keys()
        own = {key: value for key, value in options.items() if key in ours}
        return own, {key: value for key, value in options.items() if key not in ours}

    def compile(self, request: Request) -> Any:
        if not _parts:
            return request.upstream()
        own, inductor = _options_of(request)
        if is_plain(request.gm, request.inputs, own):
            report.start(own.report)
            return request.upstream()
        graph = (request.gm, request.inputs, own, inductor)
        for part in _parts.values():
            if part.compile_graph is not None:
                return part.compile_graph(*graph, request.region)
        session = CompileSession(request.gm, own, inductor, region=request.region)
        return session.run(request.gm, request.inputs)


def _options_of(request: Request) -> tuple[PassOptions, dict[str, Any]]:
    """Our options and Inductor's of one compile: its own count more than those of ``install()``,
    these more than a plugin's.
    """
    given: dict[str, Any] = {}
    for owner in sorted(_parts, key=USER.__eq__):
        given.update(_parts[owner].options)
    attached, inductor = taken_off(request.inductor)
    own = split({**given, **request.own})[0]
    if attached is not None:
        own = attached.updated(own, request.own)
    return own, inductor
