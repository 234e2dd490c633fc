"""Patches of torch, each with its way back, the stack of those in force, and names that a torch may
lack.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any, Protocol

from dynamo_dist.errors import ActivationError


def _optional(module: str, *names: str) -> Any:
    """The first of ``names`` that ``module`` has; None if it has none of them."""
    found = importlib.import_module(module)
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def _optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# A function of torch that a patch stands before.
Upstream = Callable[..., Any]
log = logging.getLogger(__name__)
_MISSING = object()
_PACKAGE = str(Path(__file__).parents[1])


def has(owner: Any, *names: str, off: str) -> bool:
    """Return whether ``owner`` has these names of torch's own; else warn of what is ``off``
    without them.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        where = getattr(owner, "__name__", type(owner).__name__)
        log.warning("This torch has no %s in %s: %s.", ", ".join(missing), where, off)
    return not missing


class Patch(Protocol):
    """One thing done to torch. ``undo`` is called once after ``apply`` and restores exactly."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


_noting = False


@contextlib.contextmanager
def makers_recorded() -> Iterator[None]:
    """Changes made in the block keep the functions that made them, innermost first, as
    ``makers``.
    """
    global _noting  # noqa: PLW0603 - read by every change that is made
    before, _noting = _noting, True
    try:
        yield
    finally:
        _noting = before


class Made:
    """A change of one place of torch, which can say who made it."""

    makers: tuple[
        tuple[str, str], ...
    ] = ()  # module and docstring of each function, innermost first

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__new__(cls)
        if _noting:
            made.makers = tuple(_callers(sys._getframe(1)))
        return made


def _callers(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        doc = code.co_consts[0] if code.co_consts else None
        # Of our functions, not of what only groups or adapts: lambdas, generators, methods.
        if isinstance(doc, str) and "<" not in code.co_name and not code.co_name.startswith("__"):
            yield f"{module}.{code.co_name}", doc
        frame = frame.f_back


class NotOursError(Exception):
    """Somebody else has changed the same place since: it is left as it is."""

    def __init__(self, value: object) -> None:
        module = getattr(value, "__module__", None) or type(value).__module__
        name = getattr(value, "__qualname__", type(value).__qualname__)
        code = getattr(value, "__code__", None)
        where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
        super().__init__(f"which is now {module}.{name}{where}")


@contextlib.contextmanager
def applied(*patches: Patch) -> Iterator[None]:
    """Have these patches in force in the block."""
    with contextlib.ExitStack() as stack:
        for patch in patches:
            patch.apply()
            stack.callback(patch.undo)
        yield


class OwnState:
    """Something of ours, or what torch remembers, that follows the switch: no place of torch is
    changed.
    """


class Place(Made):
    """A change of one place of torch, applied and undone in the same way for all subclasses.

    Each subclass says how the place is read and written.
    """

    value: object

    def read(self) -> object:
        """What stands there; ``_MISSING`` if nothing does."""
        raise NotImplementedError

    def write(self, value: object) -> None:
        """Put ``value`` there; ``_MISSING`` empties the place."""
        raise NotImplementedError

    def apply(self) -> None:
        self.before = self.read()
        self.write(self.value)

    def undo(self) -> None:
        """Put back what was there. Raises NotOursError where something else stands there than we
        have put.
        """
        if (now := self.read()) is not self.value:
            raise NotOursError(getattr(now, "__func__", now))
        self.write(self.before)


class SetAttribute(Place):
    """Replace or add an attribute of a class or a module; descriptors are kept as they are.

    A function of ours is for eager mode: Dynamo breaks where a function that it traces calls it,
    unless it is ``traced``.
    """

    def __init__(self, owner: Any, name: str, value: object, *, traced: bool = False) -> None:
        self.owner, self.name, self.value, self.traced = owner, name, value, traced

    def apply(self) -> None:
        if not self.traced:
            _keep_from_dynamo(self.value)
        super().apply()

    def read(self) -> object:
        return vars(self.owner).get(self.name, _MISSING)

    def write(self, value: object) -> None:
        if value is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, value)


def _keep_from_dynamo(value: object) -> None:
    """Mark a function of ours as ``torch.compiler.disable(recursive=False)`` does, without a
    wrapper.

    Python runs it, and what it calls is compiled or not as ever. The wrapper raises while a program
    is exported. Names seen in 2.13 to 2.15.
    """
    function: Any = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    if isinstance(function, FunctionType) and function.__code__.co_filename.startswith(_PACKAGE):
        marked: Any = function
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = "it runs in eager mode, around graphs"


class WrapAttribute(SetAttribute):
    """Replace a function by ``wrap`` of what stands there when it is applied, so that changes
    add up.
    """

    def __init__(
        self, owner: Any, name: str, wrap: Callable[[Any], Any], *, traced: bool = False
    ) -> None:
        super().__init__(owner, name, None, traced=traced)
        self.wrap = wrap

    def apply(self) -> None:
        self.value = self.wrap(getattr(self.owner, self.name))
        super().apply()


class WrapFunction(WrapAttribute):
    """Answer the calls of a function by ``function(upstream, *args, **kwargs)``, where ``upstream``
    is what stands there when the change is applied.
    """

    def __init__(self, owner: Any, name: str, function: Callable[..., object]) -> None:
        def wrap(upstream: Upstream) -> Upstream:
            @functools.wraps(upstream)
            def call(*args: Any, **kwargs: Any) -> object:
                return function(upstream, *args, **kwargs)

            is_static = isinstance(vars(owner).get(name), staticmethod)
            return staticmethod(call) if is_static else call

        super().__init__(owner, name, wrap)
        self.function = function


class SetItem(Place):
    """Replace or add one item of a table."""

    def __init__(
        self, table: MutableMapping[Any, Any], key: object, value: object, of: object = None
    ) -> None:
        """``of`` is what the item is about, if the key does not say so."""
        self.table, self.key, self.value = table, key, value
        self.of = key if of is None else of

    def read(self) -> object:
        return self.table.get(self.key, _MISSING)

    def write(self, value: object) -> None:
        if value is _MISSING:
            self.table.pop(self.key, None)
        else:
            self.table[self.key] = value


class RemoveItem(SetItem):
    """Take one item out of a table, if it is there."""

    def __init__(self, table: MutableMapping[Any, Any], key: object) -> None:
        super().__init__(table, key, _MISSING)


class ConfigDefault(Place):
    """Another default for an entry of a torch config module, for every thread."""

    def __init__(self, config: Any, name: str, value: object) -> None:
        self.entry, self.value = config._config[name], value
        self.of = f"{config.__name__}.{name}"

    def read(self) -> object:
        return self.entry.default

    def write(self, value: object) -> None:
        self.entry.default = value


# What is in force, in order: it is undone last first, and none half. What is registered while the
# plugin is on comes on top of what ``enable()`` has put there.
_applied: list[Patch] = []


def is_enabled() -> bool:
    """Return whether ``enable()`` is in force in this process."""
    return bool(_applied)


def apply(patches: list[Patch]) -> None:
    """Apply more changes. Raises ActivationError if one fails, after undoing these; Ctrl-C
    undoes them too.
    """
    before = len(_applied)
    for patch in patches:
        try:
            patch.apply()
        except Exception as error:
            undo(before)
            raise ActivationError(
                f"enable() failed at {_describe(patch)}: {error!r}.",
                "This torch is not as we know it.",
                "Everything was restored. Report it with the output of: python -m dynamo_dist "
                "doctor",
            ) from error
        except BaseException:
            undo(before)
            raise
        _applied.append(patch)


def undo(down_to: int = 0) -> list[str]:
    """Undo all but the first ``down_to``, last first; the descriptions of those that failed, and
    why.
    """
    failures = []
    while len(_applied) > down_to:
        patch = _applied.pop()
        try:
            patch.undo()
        except NotOursError as error:
            failures.append(f"{_describe(patch)}, {error}")
        except Exception as error:
            failures.append(f"{_describe(patch)} ({error!r})")
    for failure in failures:
        log.warning("could not undo %s", failure)
    return failures


def _describe(patch: Patch) -> str:
    where = getattr(patch, "name", getattr(patch, "key", ""))
    return f"{type(patch).__name__}({where})" if where else type(patch).__name__
