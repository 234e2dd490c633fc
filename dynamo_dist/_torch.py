"""Private torch names that the package as a whole needs, each behind a feature probe: changes and their way back.

Each sub-package has a ``_torch.py`` of its own. A name that a torch lacks is None here; what differs
from version to version is made one shape. What stands here knows how to look into torch and how to
change it, not when or why.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator, MutableMapping
from importlib.metadata import EntryPoint
from types import CodeType, FrameType
from typing import Any, Protocol

import torch._dynamo.convert_frame as _convert_frame
import torch._dynamo.trace_rules as _trace_rules
import torch.compiler.config as _compiler_config
from torch._C._dynamo import eval_frame as _eval_frame
from torch._dynamo.backends import registry as _backends
from torch._ops import OpOverload, OpOverloadPacket

log = logging.getLogger(__name__)

Check = Callable[[Any], bool]
OPERATORS = (OpOverload, OpOverloadPacket)


# --- Changes: what enable() does to torch, each with its way back --------------------------------

_MISSING = object()


class Change(Protocol):
    """One thing done to torch. ``undo`` is called once after ``apply`` and restores exactly."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


_noting = False


@contextlib.contextmanager
def makers_noted() -> Iterator[None]:
    """Changes made in the block keep the functions that made them, innermost first, as ``makers``."""
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


class SetAttribute(Made):
    """Replace or add an attribute of a class or a module; descriptors are kept as they are."""

    def __init__(self, owner: Any, name: str, value: object) -> None:
        self.owner, self.name, self.value = owner, name, value

    def apply(self) -> None:
        self.before = vars(self.owner).get(self.name, _MISSING)
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        if self.before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class WrapAttribute(SetAttribute):
    """Replace a function by ``wrap`` of what stands there when it is applied, so that changes add up."""

    def __init__(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        super().__init__(owner, name, None)
        self.wrap = wrap

    def apply(self) -> None:
        self.value = self.wrap(getattr(self.owner, self.name))
        super().apply()


class SetItem(Made):
    """Replace or add one item of a table."""

    def __init__(
        self, table: MutableMapping[Any, Any], key: object, value: object, of: object = None
    ) -> None:
        """``of`` is what the item is about, if the key does not say so."""
        self.table, self.key, self.value = table, key, value
        self.of = key if of is None else of

    def apply(self) -> None:
        self.before = self.table.get(self.key, _MISSING)
        self.table[self.key] = self.value

    def undo(self) -> None:
        if self.before is _MISSING:
            del self.table[self.key]
        else:
            self.table[self.key] = self.before


class CacheKeyTag:
    """Append ``digest`` to ``torch.compiler.config.cache_key_tag``, for every thread.

    The tag is part of the keys of torch's compile caches. From 2.13 on a value set in a thread is
    seen in that thread alone, while backward graphs may be compiled in another one: so it is the
    default that changes, and besides it the value of this thread if it had one. Seen in 2.11 to 2.15.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def apply(self) -> None:
        entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        default, from_env, here = entry.default, entry.env_value_default, _override(entry)
        self.before = (default, from_env, here)
        entry.default = default + self.digest
        if isinstance(from_env, str):
            entry.env_value_default = from_env + self.digest
        if isinstance(here, str):
            _compiler_config.cache_key_tag = here + self.digest

    def undo(self) -> None:
        entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        default, from_env, here = self.before
        entry.default, entry.env_value_default = default, from_env
        now = _override(entry)
        if (
            isinstance(here, str) and now == here + self.digest
        ):  # else the user's own, set meanwhile
            _compiler_config.cache_key_tag = here


def _override(entry: Any) -> object:
    """Return the value that this thread set for a config entry, or torch's mark for "nothing"."""
    override = entry.user_override
    return override.get() if hasattr(override, "get") else override


def cache_key_tag() -> str:
    """The tag as torch's caches read it in this thread."""
    return _compiler_config.cache_key_tag


class BackendEntryPoint:
    """Make Dynamo resolve a backend's entry point again at its next naming, once undone.

    Dynamo keeps the function that an entry point gave (``_COMPILER_FNS``) and forgets the entry
    point (``_BACKENDS``). Seen in 2.11 to 2.15.
    """

    def __init__(self, entry_point: EntryPoint) -> None:
        self.entry_point = entry_point

    def apply(self) -> None:
        self.before = _backends._BACKENDS.get(self.entry_point.name, _MISSING)

    def undo(self) -> None:
        name = self.entry_point.name
        _backends._COMPILER_FNS.pop(name, None)
        if isinstance(self.before, EntryPoint):
            _backends._BACKENDS[name] = self.before
        elif name in _backends._BACKENDS:
            _backends._BACKENDS[name] = self.entry_point


class SkippedFrames:
    """Let Dynamo look anew at functions that it has given up on, at either switch.

    A function without one graph is marked for good, whatever compiles it later, and a mark outlives the
    rules by which it was made. Compiled code stays: only functions without any are forgotten.
    ``input_codes`` and ``_debug_get_cache_entry_list`` were seen in 2.11 to 2.15.
    """

    def apply(self) -> None:
        tried = getattr(_convert_frame, "input_codes", None)
        entries = getattr(_eval_frame, "_debug_get_cache_entry_list", None)
        if tried is None or entries is None:
            return
        for code in [reference() for reference in tried.seen]:
            if code is not None and not entries(code):
                _eval_frame.reset_code(code)

    undo = apply


def frames_left_alone(is_ours: Callable[[str], bool]) -> Change:
    """Have Dynamo run functions in files that ``is_ours`` as they are, where none that it traces calls them.

    Eager mode calls them inside a function that Dynamo gave up on, such as one with a break in a loop. Then it
    looks at each frame below, and would compile our dispatching of operators, as it never does torch's own.
    ``trace_rules.check`` was seen in 2.11 to 2.15.
    """

    def wrap(stock: Any) -> Any:
        @functools.wraps(stock)
        def check(obj: Any, is_inlined_call: bool = False, *args: Any, **kwargs: Any) -> Any:
            if not is_inlined_call and isinstance(obj, CodeType) and is_ours(obj.co_filename):
                return True
            return stock(obj, is_inlined_call, *args, **kwargs)

        return check

    return WrapAttribute(_trace_rules, "check", wrap)


def forget_backend(name: str) -> None:
    """Take back what another thread has registered while this one was loading: stock refuses a second.

    ``_COMPILER_FNS`` was seen in 2.11 to 2.15.
    """
    _backends._COMPILER_FNS.pop(name, None)


def same_backend_twice() -> Change:
    """Let several threads register the same backend: each that names it first does, and stock's second fails.

    ``register_backend`` was seen in 2.11 to 2.15.
    """

    def wrap(stock: Any) -> Any:
        @functools.wraps(stock)
        def register(compiler_fn: Any = None, name: str | None = None, tags: Any = ()) -> Any:
            if name is not None and _backends._COMPILER_FNS.get(name, _MISSING) is compiler_fn:
                return compiler_fn
            return stock(compiler_fn, name, tags)

        return register

    return WrapAttribute(_backends, "register_backend", wrap)


# Dynamo holds this lock while it traces: under it no table changes in the middle of a trace, and
# two threads cannot enable and disable at once.
compile_lock = _convert_frame.compile_lock


# --- Checks of guards ------------------------------------------------------------------------------


def same_or(value: object, check: Check) -> Check:
    """Return a check that an object is ``value``, or equals it, or passes ``check``.

    A Python function would cost a frame for each call of a guard; this compares identities in C.
    """
    return [value, _Passing(check)].__contains__


class _Passing:
    """Equal to whatever passes a check."""

    def __init__(self, check: Check) -> None:
        self.check = check

    def __eq__(self, now: object) -> bool:
        return self.check(now)

    __hash__ = None  # type: ignore[assignment]


# --- The job: its store, its groups ---------------------------------------------------------------


def job_store() -> Any:
    """The default group's c10d store; None without one, or where the group is a fake.

    ``_get_default_store`` was seen in 2.11 to 2.15.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    from torch.distributed import distributed_c10d

    get_store: Any = getattr(distributed_c10d, "_get_default_store", None)
    return None if get_store is None else get_store()


def real_group_ranks(name: str) -> tuple[int, ...] | None:
    """Global ranks of a group that moves data; None for a fake one or where nobody knows the name.

    ``_resolve_process_group`` was seen in 2.11 to 2.15.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    try:
        resolve: Any = getattr(distributed_c10d, "_resolve_process_group")  # noqa: B009 - not exported
        group = resolve(name)
        if dist.get_backend(group) == "fake":
            return None
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, LookupError, RuntimeError, ValueError):
        return None


def global_rank() -> int:
    """This process's rank in the job."""
    import torch.distributed as dist

    return dist.get_rank()


# --- Operators of others -------------------------------------------------------------------------


def is_custom_op(name: str) -> bool:
    """Return whether ``torch.library.custom_op`` made the operator, so that its schema is checked.

    Its implementations run below autograd anyway. ``OPDEFS`` was seen in 2.11 to 2.15.
    """
    from torch._library import custom_ops

    return name in getattr(custom_ops, "OPDEFS", ())
