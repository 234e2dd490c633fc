"""Options of ``torch.compile`` that carry the passes, and the ownership of Inductor's own
scheduling.

Upstream Inductor has schedulers of its own (some opt-in, one on by default from torch 2.14). Two of
them undo each other, so while our passes schedule, upstream's are off; with ours off, upstream's
stay as the user set them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from inductor_passes.inductor.hooks import Attachment, attach, attach_to_joint
from inductor_passes.pass_options import PassOptions, split
from inductor_passes.report import report
from inductor_passes.torch_compat import inductor as inductor_compat

if TYPE_CHECKING:
    from inductor_passes.inductor.session import CompileSession

log = logging.getLogger(__name__)

# Everything in Inductor that moves a launch or a wait, by configuration key and its off value.
UPSTREAM_SCHEDULERS: Mapping[str, object] = {
    "reorder_for_compute_comm_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "enable_simple_overlap": False,
    "_micro_pipeline_tp": False,
    "_fuse_ddp_communication": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
}


def upstream_schedulers_on(patches: Mapping[str, Any]) -> dict[str, object]:
    """Upstream's schedulers that would run under the current configuration and ``patches``."""
    known = inductor_compat.config_keys()
    found = {}
    for key, off in UPSTREAM_SCHEDULERS.items():
        if key in known:
            value = patches[key] if key in patches else inductor_compat.get_config(key)
            if value != off and value is not None:
                found[key] = value
    return found


def take_ownership(patches: Mapping[str, Any]) -> dict[str, object]:
    """Patches that switch upstream's schedulers off, with a warning for what the user had asked
    for.
    """
    running = upstream_schedulers_on(patches)
    say_taken(
        running,
        patches,
        "Inductor's own scheduling (%s) is off in this compile: two schedulers undo each "
        "other, and the pass 'schedule' owns it. Use options={'schedule': 'off'} "
        "to let Inductor's run instead.",
    )
    if running:
        log.info("Inductor's own scheduling is off in this compile: %s", ", ".join(sorted(running)))
    return {key: UPSTREAM_SCHEDULERS[key] for key in running}


# What has been said of a key and of where it was set: once in a process.
_said: set[tuple[str, str]] = set()


def say_taken(keys: Iterable[str], patches: Mapping[str, Any], message: str) -> None:
    """Warn, once in a process, of those of ``keys`` that the user has set, by options or for the
    process.

    ``message`` has one ``%s`` for them. What torch has on by default was asked for by nobody.
    """
    asked = []
    for key in sorted(keys):
        given = key in patches
        if given or inductor_compat.is_config_set(key):
            where = "options" if given else "torch._inductor.config"
            if (key, where) not in _said:
                _said.add((key, where))
                asked.append(f"{key}, set in {where}")
    if asked:
        log.warning(message, "; ".join(asked))


_JOINT = "joint_custom_post_pass"  # seen in 2.11 to 2.15


def options(given: Mapping[str, Any] | None = None, /, **more: Any) -> dict[str, Any]:
    """Options for ``torch.compile(model, options=inductor_passes.options(...))``.

    Takes our options (see ``PassOptions``) and any of Inductor's, as a mapping, as keywords or
    both. Raises OptionError, naming the known ones, for an option or pass that nobody knows, and
    TopologyError for a bad topology.
    """
    own, inductor = split({**(given or {}), **more})
    return config_patches(own, inductor)


def observer() -> Any:
    """The object for ``post_grad_custom_post_pass`` that records each graph and changes none; it
    gives way to ours.
    """
    return attach(Attachment(PassOptions(passes=(), schedule="off"), observes=True))[1]


def config_patches(
    own: PassOptions,
    inductor: Mapping[str, Any],
    *,
    uneven: bool = False,
    place: str = "",
    session: CompileSession | None = None,
) -> dict[str, Any]:
    """Inductor configuration that runs the passes; passes the user has set keep running, first.

    ``uneven``: some value's shards differ in size, so that ranks may hold different graphs.
    ``place``: where the graph stands in the program, for what caches hold of it. ``session``: the
    compile that these are for.
    """
    report.start(own.report)
    patches = dict(inductor)

    def value(key: str) -> Any:
        return patches[key] if key in patches else inductor_compat.get_config(key)

    has_joint = inductor_compat.has_config(_JOINT)
    attachment = Attachment(
        options=own,
        chain_pre=_as_one(value("post_grad_custom_pre_pass")),
        chain_post=_unless_it_observes(_as_one(value("post_grad_custom_post_pass"))),
        chain_joint=_as_one(value(_JOINT)) if has_joint else None,
        locality=bool(value("reorder_for_locality")),
        locality_in_training=inductor_compat.has_config("reorder_for_locality_in_training")
        and bool(value("reorder_for_locality_in_training")),
        uneven=uneven,
        place=place,
        session=session,
    )
    pre, post = attach(attachment)
    if has_joint:
        patches[_JOINT] = attach_to_joint(attachment)
    patches["post_grad_custom_pre_pass"] = pre
    patches["post_grad_custom_post_pass"] = post
    # Upstream's runs first of all and cannot tell whether a graph communicates; ours can
    # (pipeline.py).
    if value("reorder_for_locality"):
        say_taken(
            ["reorder_for_locality"],
            inductor,
            "Inductor's own pass (%s) is left out of graphs that communicate: it would bring each "
            "wait to its launch. Other graphs have it.",
        )
    patches["reorder_for_locality"] = False
    if own.schedule != "off":
        patches.update(take_ownership(patches))
    return patches


def _unless_it_observes(pass_: Any) -> Any:
    attachment = getattr(pass_, "attachment", None)
    return None if isinstance(attachment, Attachment) and attachment.observes else pass_


def taken_off(inductor: Mapping[str, Any]) -> tuple[PassOptions | None, dict[str, Any]]:
    """Our options that ``options()`` has put among Inductor's, and these as the user gave them to
    it.

    None where there are none; what only looks at graphs is taken off too.
    """
    left = dict(inductor)
    found: PassOptions | None = None
    for side in ("pre", "post"):
        key = f"post_grad_custom_{side}_pass"
        attachment = getattr(left.get(key), "attachment", None)
        if not isinstance(attachment, Attachment):
            continue
        chained = attachment.chain_pre if side == "pre" else attachment.chain_post
        left.pop(key)
        if chained is not None:
            left[key] = chained
        if not attachment.observes:
            found = attachment.options
            left["reorder_for_locality"] = attachment.locality
    ours = getattr(left.get(_JOINT), "attachment", None)
    if isinstance(ours, Attachment):
        left.pop(_JOINT)
        if ours.chain_joint is not None:
            left[_JOINT] = ours.chain_joint
    return found, left


def _as_one(given: Any) -> Any:
    """A user's pass, or list of passes (torch 2.13 on), as one; ours are taken off, not run
    twice.
    """
    if given is None:
        return None
    several = given if isinstance(given, (list, tuple)) else (given,)
    passes = [p for p in several if not hasattr(p, "attachment")]
    if not passes:
        return None
    return passes[0] if len(passes) == 1 else PassList(tuple(passes))


class PassList:
    """Several Inductor passes called in order; without a uuid if one of them has none."""

    def __init__(self, passes: tuple[Any, ...]) -> None:
        self.passes = passes

    def __call__(self, graph: Any, is_inference: bool = False) -> None:
        for pass_ in self.passes:
            inductor_compat.call_pass(pass_, graph, is_inference)

    def uuid(self) -> str | None:
        uuids = [getattr(p, "uuid", lambda: None)() for p in self.passes]
        return None if None in uuids else repr(uuids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PassList) and self.passes == other.passes

    def __hash__(self) -> int:
        return hash(self.passes)
