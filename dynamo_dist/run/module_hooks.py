"""The hooks of a module, compared by the versions of the dictionaries that hold them.

Stock walks through three dictionaries of each module that tensor parallel styles have put hooks on. Those of
the module that was traced are what they were until their versions change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from dynamo_dist.run.closures import are
from dynamo_dist.torch_compat import dynamo_guards
from dynamo_dist.torch_compat import dynamo_guards as checks_compat

_MODULE_HOOKS_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DICTS = (*_MODULE_HOOKS_HOOKS, "_forward_hooks_always_called")


class ModuleHooks:
    """Modules of which one check stands for all guards on their hooks.

    ``guards``: those that are left beside ``hooks``: source of a hook -> check that stands for all guards on it.
    checks: source of a module -> its check, in the place of those of ``hooks`` that are ``replaced`` and of the
        guards whose ``id``s are ``implied``.
    """

    def __init__(self, guards: Iterable[Any], hooks: Mapping[Any, checks_compat.Check]) -> None:
        self.checks: dict[Any, checks_compat.Check] = {}
        self.replaced: set[Any] = set()
        self.implied: set[int] = set()
        if dynamo_guards.dict_version is None:
            return
        below: dict[Any, list[Any]] = defaultdict(list)
        for guard in guards:
            held_by = dynamo_guards.attribute_above(guard.originating_source, _DICTS)
            if held_by is not None:
                below[held_by.base].append(guard)
        sources: dict[Any, list[Any]] = defaultdict(list)
        for source in hooks:
            sources[dynamo_guards.attribute_above(source, _DICTS).base].append(source)
        for owner, those in sources.items():
            if all(map(_is_on_dictionary, below[owner])):
                self._add(owner, {source: hooks[source] for source in those}, below[owner])

    def _add(
        self, owner: Any, hooks: Mapping[Any, checks_compat.Check], under: Sequence[Any]
    ) -> None:
        try:
            module = dynamo_guards.value_of_source(owner)
            checks = {
                id(dynamo_guards.value_of_source(source)): check for source, check in hooks.items()
            }
        except LookupError:
            return
        if isinstance(module, nn.Module) and all(
            id(hook) in checks for hook in chain(*_hooks(module))
        ):
            self.checks[owner] = _Hooks(module, checks).are_same
            self.replaced |= set(hooks)
            self.implied |= set(map(id, under))


def _is_on_dictionary(guard: Any) -> bool:
    return dynamo_guards.is_on_size_or_type(guard) and any(
        dynamo_guards.is_on(guard, name) for name in _DICTS
    )


def _hooks(module: Any) -> list[list[Any]]:
    return [list(getattr(module, name).values()) for name in _MODULE_HOOKS_HOOKS]


def _versions(module: Any) -> tuple[int, int, int]:
    version = dynamo_guards.dict_version
    return (
        version(module._forward_hooks),
        version(module._forward_pre_hooks),
        version(module._forward_hooks_always_called),
    )


class _Hooks:
    """The hooks of ``module`` as it was traced; ``checks``: id of a hook -> whether another is the same."""

    def __init__(self, module: Any, checks: Mapping[int, checks_compat.Check]) -> None:
        self.traced = _hooks(module)
        self.checks = [[checks[id(hook)] for hook in hooks] for hooks in self.traced]
        self.types = [type(getattr(module, name)) for name in _DICTS]
        self.versions = _versions(module)

    def are_same(self, module: Any) -> bool:
        """Return whether another module, or this one later, has hooks that do the same."""
        versions = _versions(module)
        if versions == self.versions:
            return True
        if [type(getattr(module, name)) for name in _DICTS] != self.types:
            return False
        now = _hooks(module)
        if not all(map(_pass, self.checks, now)):
            return False
        if module._forward_hooks.keys() & module._forward_hooks_always_called.keys():
            return False
        # Closures of the traced hooks are compared on every call, and those of others here alone.
        if are(chain(*self.traced), chain(*now)):
            self.versions = versions
        return True


def _pass(checks: Sequence[checks_compat.Check], hooks: Sequence[Any]) -> bool:
    return len(checks) == len(hooks) and all(
        check(hook) for check, hook in zip(checks, hooks, strict=True)
    )
