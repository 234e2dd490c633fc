"""Guards that cost less on every call and fail when stock's would.

Three kinds take most of the time of a DTensor module's guards: each parameter's spec and mesh is compared
field by field in Python, each hook of a tensor parallel style is guarded leaf by leaf, and functions of
ours that are traced in place of torch's are guarded like the program's own.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.run.closures import Closures
from dynamo_dist.run.module_hooks import ModuleHooks
from dynamo_dist.torch_compat import dtensor_specs, dynamo_guards
from dynamo_dist.torch_compat import dynamo_guards as checks_compat
from dynamo_dist.torch_compat.patching import Change

log = logging.getLogger(__name__)


def changes() -> list[Change]:
    """List the changes to apply while the plugin is enabled."""
    return [dynamo_guards.wrap_checks(name, identity_first) for name in dynamo_guards.VALUE_GUARDS]


def is_on_own_code(guard: Any) -> bool:
    """Return whether it guards what stands in our own modules and stays: functions, constants, imported modules.

    What is read by way of a module that ours import, such as the default group, is guarded.
    """
    named = dynamo_guards.module_and_member(guard)
    if named is None or named[0].split(".")[0] != __name__.split(".")[0]:
        return False
    module, member = named
    value = None if member is None else getattr(sys.modules[module], member, None)
    return dynamo_guards.is_on_code(guard) or isinstance(value, (str, int, float, tuple, frozenset))


def identity_first(value: object, check: checks_compat.Check) -> checks_compat.Check:
    """``check``, which ``value`` passes, not asked about ``value`` itself or a spec that equals it.

    ``value`` is held, so that its identity is not given to another. Values that may change while they
    are the same object, which is all but specs and meshes, are checked every time.
    """
    if isinstance(value, dtensor_specs.DTensorSpec):
        return checks_compat.same_or(value, check)
    if isinstance(value, DeviceMesh):  # those that count as equal may have other groups
        return lambda now: now is value or check(now)
    return check


def lighten() -> dict[Any, object]:
    """Replace guards of the frame that is being compiled, before they are built.

    Returns what settled cells of hooks' closures hold, by their sources.
    """
    guards = dynamo_guards.guards()
    if guards is None:
        return {}
    own = {id(guard) for guard in guards.inner if is_on_own_code(guard)}
    closures = Closures(guards)
    left = [guard for guard in guards.inner if id(guard) not in closures.implied | own]
    modules = ModuleHooks(left, closures.checks)
    dropped = _meshes_of_specs(guards) | closures.implied | modules.implied | own
    if dropped:
        log.debug("%d guards are implied by others", len(dropped))
        checks = {
            at: is_same for at, is_same in closures.checks.items() if at not in modules.replaced
        }
        checks |= modules.checks
        if checks:
            last, check = checks.popitem()
            checks[last] = lambda value: closures.are_as_they_were() and check(value)
        dynamo_guards.replace(guards, dropped, checks)
    return closures.contents


def _meshes_of_specs(guards: Any) -> set[int]:
    """Guards on the mesh of a DTensor whose spec is guarded, which compares the mesh."""
    specs = {
        dynamo_guards.owner(each) for each in guards.inner if dynamo_guards.is_on(each, "_spec")
    }
    return {
        id(guard)
        for guard in guards.inner
        if dynamo_guards.is_on(guard, "device_mesh") and dynamo_guards.owner(guard) in specs
    }
