"""``enable()``, ``disable()``, ``enabled()``: one switch for the process.

Everything that enabling changes in torch is a ``Patch`` with a way back, kept on one stack, so
that ``disable()`` leaves torch as it was. A function compiled while enabled keeps working after
that: its guards need no object of ours in torch's tables. When one of them fails, upstream's rules
trace the function anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping

from dynamo_dist import settings
from dynamo_dist.errors import ActivationError
from dynamo_dist.settings import DistConfig
from dynamo_dist.settings import digest as digest
from dynamo_dist.torch_compat import patching
from dynamo_dist.torch_compat.patching import is_enabled

log = logging.getLogger(__name__)


def enable(*, inductor: bool | Mapping[str, object] = False) -> None:
    """Change torch's tables so that distributed programs trace; nothing happens if it is on
    already. With ``inductor``, ``backend="inductor"`` compiles as ``backend="dynamo_dist"`` does.

    ``inductor``: for programs that cannot name a backend, because ``backend="inductor"`` is torch's
    default. It holds for this process. A mapping is our options (``inductor_passes.PassOptions``)
    for compiles that name none. ``DYNAMO_DIST_INDUCTOR=1`` does the same.

    Once on, one ``disable()`` turns all of it off, however often it was enabled. Raises
    UnsupportedTorchError, ConfigError for a bad environment variable, OptionError for an unknown
    option, and ActivationError if a change fails, after undoing the others.
    """
    settings.check()
    config = DistConfig.from_env()
    # After the check: on a torch that is not supported, these imports may fail.
    from dynamo_dist import graph_compile, patch_stack, plugins
    from dynamo_dist.torch_compat import dynamo_compiler
    from dynamo_dist.tracing import trackers

    options = graph_compile.checked(inductor if isinstance(inductor, Mapping) else {})
    if inductor is not False:
        config = dataclasses.replace(config, inductor=True)
    with dynamo_compiler.compile_lock:
        if is_enabled():
            if config.inductor and (options or graph_compile.taken() is None):
                patching.apply([graph_compile.taking(options)])
            return
        plugins.read_plugins()
        graph_compile.notice_reads()
        patching.apply(patch_stack.patches(config, options))
        log.info("enabled: trackers %s", [entry.name for entry in trackers.active(config)])


def disable() -> None:
    """Restore every table of torch as it was before ``enable()``; nothing happens if it is off.

    Raises ActivationError if a change cannot be undone, after undoing the others: a place that
    somebody else has changed since is left to them, and named.
    """
    if not is_enabled():
        return
    # It loads torch's compiler, which a process that never enabled does without.
    from dynamo_dist.torch_compat import dynamo_compiler

    with dynamo_compiler.compile_lock:
        if failures := patching.undo():
            raise ActivationError(
                f"disable() could not undo {'; '.join(failures)}.",
                "All other changes are undone.",
                "Take the other change back first, or restart the process to be sure of upstream "
                "behaviour.",
            )
        log.info("disabled")


@contextlib.contextmanager
def enabled(*, inductor: bool | Mapping[str, object] = False) -> Iterator[None]:
    """Enable inside the block, then restore the previous state, on or off, whatever the block did.

    ``inductor``: as ``enable()`` takes it.
    """
    with restored():
        enable(inductor=inductor)
        yield


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Restore the state from before the block, on or off, when the block ends."""
    settings.check()
    # After the check: on a torch that is not supported, these imports may fail.
    from dynamo_dist import graph_compile
    from dynamo_dist.torch_compat import dynamo_compiler

    # ``DYNAMO_DIST_INDUCTOR`` enables at the first compile, which may be one in the block.
    dynamo_compiler.begin_to_compile()
    was_on, options = is_enabled(), graph_compile.taken()
    try:
        yield
    finally:
        # Not asked for again where ``enable()`` itself failed.
        if was_on and not is_enabled():
            enable(inductor=False if options is None else options)
        elif not was_on:
            disable()
        graph_compile.restore(options)
