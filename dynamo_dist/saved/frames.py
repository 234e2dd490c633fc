"""Frames that Dynamo has traced, kept for ``save``, and run after ``load`` without being traced again.

A frame that was loaded runs only where everything that its trace depended on is the same here: the code of the frame and the files of all code
that was inlined, Dynamo's settings and torch's state, and the content of each guarded value. Its guards are then built for
the values of this process, as after a trace, and the backend gets the graph, as after a trace.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.run import shared_memory
from dynamo_dist.saved.contents import Content, NotByContent, code_digest
from dynamo_dist.saved.guarded import contents_of, contents_of_reached
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dynamo import (
    frame_pickles,
    frame_values,
    kept_frames,
    replayed_frames,
)
from dynamo_dist.torch_compat.dynamo.kept_frames import CannotKeep
from inductor_passes.attach import uneven
from inductor_passes.collector import rare_cycle_collection, without_cycle_collection

log = logging.getLogger(__name__)
_compile: ContextVar[kept_frames.Compile | None] = ContextVar("compile", default=None)


@dataclass(frozen=True, slots=True)
class Kept:
    """A frame for another process. ``code``: its digest. ``where``: for people. ``because``: why it cannot be kept, or "".

    ``asks``: contents by guards, in words; ``files``: digests of what was traced; ``body``: the frame.
    """

    code: str
    where: str
    because: str
    settings: tuple[tuple[str, str], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    asks: tuple[tuple[str, Content], ...] = ()
    body: bytes = b""

    def name(self) -> str:
        """A digest of all of it."""
        return hashlib.sha256(self.dumps()).hexdigest()[:16]

    def dumps(self) -> bytes:
        """Inverse of ``loads``."""
        return frame_pickles.plain_dumps(asdict(self))


_kept: list[Kept] = []
_loaded: dict[str, list[Kept]] = {}
_from: list[str] = []
_backends: set[str] = set()  # of frames that were loaded
_BACKEND = "the backend"


def changes() -> list[Change]:
    """List the changes to apply while the plugin is enabled."""
    return replayed_frames.asked_first(_made)


def kept() -> list[Kept]:
    """Frames of this process so far, each once."""
    return list(dict.fromkeys(_kept))


def take(path: str, contents: Iterable[bytes]) -> int:
    """Use these frames from now on; how many can be used."""
    found = [Kept(**frame_pickles.plain_loads(each)) for each in contents]
    if path not in _from:
        _from.append(path)
    for each in found:
        _loaded.setdefault(each.code, []).append(each)
        _backends.add(dict(each.settings)[_BACKEND])
    return sum(not each.because for each in found)


@contextlib.contextmanager
def of_graph(gm: fx.GraphModule) -> Iterator[None]:
    """A backend of ours compiles ``gm`` in the block: notes for the frame what it is given, and what it does to it."""
    noted = _compile.get()
    if noted is None:
        yield
        return
    noted.compiles += 1
    noted.guards = kept_frames.current_guards()
    try:
        if shared_memory.is_written(gm):
            raise CannotKeep("a graph that writes to a tensor")
        noted.graph = kept_frames.graph_of(gm)
        noted.graph["meta"][uneven.KNOWN] = uneven.has_uneven_values(gm)
    except CannotKeep as error:
        noted.because = str(error)
    yield
    noted.left = {id(guard) for guard in kept_frames.current_guards()}
    noted.inputs = kept_frames.inputs_of(gm)


def _made(
    trace: Callable[[], Any],
    code: Any,
    globals_: dict[str, Any],
    locals_: Mapping[str, Any],
    backend: Callable[..., Any],
    one_graph: bool,
) -> Any:
    """What Dynamo makes of a frame: from what was loaded, or by tracing it."""
    if frame_values.name_of_backend(backend) in _backends:
        with without_cycle_collection():  # an eighth of a loaded start
            made = _from_loaded(code, globals_, locals_, backend, one_graph)
        if made is not None:
            return made
    noted = kept_frames.Compile()
    token = _compile.set(noted)
    modes, settings = frame_values.modes(), _settings(backend, one_graph)
    try:
        with rare_cycle_collection():
            made = trace()
    finally:
        _compile.reset(token)
    if noted.compiles:
        _kept.append(_keep(made, code, noted, modes, settings, (locals_, globals_)))
    return made


def _keep(
    made: Any,
    code: Any,
    noted: kept_frames.Compile,
    modes: str,
    settings: tuple[tuple[str, str], ...],
    scope: tuple[Mapping[str, Any], dict[str, Any]],
) -> Kept:
    digest, where = code_digest(code), _where(code)
    try:
        if modes or noted.because:
            raise CannotKeep(modes or noted.because)
        frame = kept_frames.frame_of(made, noted)
        asks = tuple(_asks(frame, frame_values.Values(*scope)))
        files = tuple(map(_digest_of_file, kept_frames.traced_files(made)))
        return Kept(digest, where, "", settings, files, asks, frame_pickles.dumps(frame, _refuse))
    except (CannotKeep, NotByContent) as error:
        why = str(error)
    except Exception as error:  # of code of the program, which contents may ask
        why = f"an error in asking what it depends on ({error!r})"
    log.debug("%s will be traced in a job that loads it: %s", where, why)
    return Kept(digest, where, why, settings)


def _from_loaded(
    code: Any,
    globals_: dict[str, Any],
    locals_: Mapping[str, Any],
    backend: Callable[..., Any],
    one_graph: bool,
) -> Any:
    modes, settings = frame_values.modes(), dict(_settings(backend, one_graph))
    why = "it is not among what was saved"
    for each in _loaded.get(code_digest(code), ()):
        try:
            if modes or each.because:
                raise CannotKeep(modes or each.because)
            _check(each, settings)
            frame = frame_pickles.loads(each.body, globals_)
            replay = replayed_frames.Replay(frame, code, locals_, globals_)
            made = _replayed(replay, each, backend)
        except (CannotKeep, NotByContent) as error:
            why = str(error)
            continue
        except replayed_frames.BACKEND_ERRORS:
            raise
        except Exception as error:  # of a torch that replays otherwise
            why = f"an error in running what was saved ({error!r})"
            continue
        _kept.append(each)
        log.info("%s was not traced: loaded from %s", each.where, ", ".join(_from))
        return made
    log.warning(
        "%s is traced, and not loaded from %s, because of %s.", _where(code), ", ".join(_from), why
    )
    return None


def _replayed(replay: replayed_frames.Replay, each: Kept, backend: Callable[..., Any]) -> Any:
    try:
        replay.reach()
        _compare(each, replay.frame, replay.values)
        replay.begin()
        return replay.compile(backend)
    except BaseException:
        replay.drop()
        raise


def _asks(
    frame: kept_frames.KeptFrame, values: frame_values.Values
) -> Iterator[tuple[str, Content]]:
    yield from contents_of([*frame.guards, *frame.later], values)
    yield from contents_of_reached(frame.reached, values)


def _compare(each: Kept, frame: kept_frames.KeptFrame, values: frame_values.Values) -> None:
    """Raise CannotKeep or NotByContent, naming the guard, where a value is not what it was in the traced frame."""
    try:
        now = _asks(frame, values)
        for (label, then), (_, content) in zip(each.asks, now, strict=True):
            if content != then:
                raise CannotKeep(f"{label} is another one")
    except (CannotKeep, NotByContent):
        raise
    except Exception as error:  # of code of the program, which contents may ask
        raise CannotKeep(f"an error in comparing what it depends on ({error!r})") from None


def _check(each: Kept, settings: Mapping[str, str]) -> None:
    for name, value in each.settings:
        if settings.get(name) != value:
            raise CannotKeep(f"{name}: {value} -> {settings.get(name)}")
    for path, digest in each.files:
        if _digest_of_file(path)[1] != digest:
            raise CannotKeep(f"a change of {path}")


def _settings(backend: Callable[..., Any], one_graph: bool) -> tuple[tuple[str, str], ...]:
    return (
        (_BACKEND, frame_values.name_of_backend(backend)),
        ("fullgraph", str(one_graph)),
        *frame_values.settings(),
    )


@functools.cache
def _digest_of_file(path: str) -> tuple[str, str]:
    try:
        with open(path, "rb") as file:
            return path, hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        raise CannotKeep(f"code that is in no file ({path})") from None


def _refuse(value: Any) -> None:
    """Raise CannotKeep for what must not be carried to another process in a graph."""
    if isinstance(
        value,
        (
            torch.Tensor,
            DeviceMesh,
            dist.ProcessGroup,
            torch.ScriptObject,
            torch.SymInt,
            torch.nn.Module,
        ),
    ):
        raise CannotKeep(f"a graph that holds a {type(value).__name__}")


def _where(code: Any) -> str:
    return f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
