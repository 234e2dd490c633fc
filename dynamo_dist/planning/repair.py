"""``options={"plan": "repair"}``: compile a graph with every placement re-solved that the user has
not set.

A plan is made once for a graph and found again in a file beside Inductor's cache, or in the user's
own (``options={"plan": "plan.json"}``). Whatever cannot be planned, or does not fit, is compiled as
upstream does.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from dynamo_dist.diagnostics import collector
from dynamo_dist.errors import PlanError
from dynamo_dist.planning import file
from dynamo_dist.planning.cost import Prices
from dynamo_dist.planning.planner import plan, record
from dynamo_dist.planning.trace import Session, bracketed
from dynamo_dist.plugins import Compile
from dynamo_dist.torch_compat import dtensor_placements, dtensor_planning, inductor_code
from dynamo_dist.torch_compat.dynamo_compiler import CacheKeyTag
from dynamo_dist.torch_compat.patching import applied

log = logging.getLogger(__name__)

_MARKED = ("enter", "leave")


def compile_repaired(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    compile_: Compile,
    prices: Prices,
    rules: str,
    path: str | None = None,
) -> Callable[..., object]:
    """Plan the Dynamo graph ``gm``, and compile it by ``compile_`` with the plan carried out.

    ``rules`` is a digest of everything that makes strategies what they are; ``path`` the user's
    plan file. Raises PlanError for a file that cannot be read.
    """
    if not any(isinstance(given, DTensor) for given in inputs):
        return compile_(gm, inputs)
    name = fingerprint(gm, inputs)
    stored = find_plan(gm, inputs, name, prices, rules, path)
    if stored is not None:
        collector.publish_plan(stored.record(name))
    if stored is None or not stored.changes:
        return compile_(gm, inputs)
    script = stored.script()
    digest = hashlib.sha256(repr(script).encode()).hexdigest()[:16]
    session, tag = Session(script), CacheKeyTag(f"plan-{digest}")
    marked = {f"{bracketed.__module__}.{fn}": digest for fn in _MARKED}
    try:
        with applied(tag), session.active(), inductor_code.cacheable(marked):
            compiled = compile_(bracketed(gm, inputs), inputs)
        session.check_complete()
        return compiled
    except Exception as error:
        unfit = _plan_error(error)
        if unfit is None:
            raise
        log.warning("Compiled without a plan. %s", unfit)
        return compile_(gm, inputs)


def find_plan(
    gm: fx.GraphModule,
    inputs: Sequence[object],
    name: str,
    prices: Prices,
    rules: str,
    path: str | None,
) -> file.StoredPlan | None:
    """The plan of a graph: from the user's file, from the cache, or made now and kept; None if
    there is none.
    """
    if path is not None:
        stored = file.load_plans(path)
        if name in stored:
            return stored[name]
        if stored:
            log.warning(
                "The plan file %s has no plan for this graph (%s): one is added.", path, name
            )
    key = hashlib.sha256(f"{name} {rules} {prices.digest()}".encode()).hexdigest()[:32]
    cached = os.path.join(inductor_code.cache_dir(), "dynamo_dist", "plans", f"{key}.json")
    with file.one_at_a_time(cached):
        stored_plan = None
        with contextlib.suppress(PlanError):  # a file of ours that is no plan is made anew
            stored_plan = file.load_plans(cached).get(name)
        if stored_plan is None:
            stored_plan = _new_plan(gm, inputs, prices)
            if stored_plan is None:
                return None
            _keep(cached, {name: stored_plan})
    if path is not None:
        _keep(path, {**file.load_plans(path), name: stored_plan})
    return stored_plan


def _keep(path: str, stored: dict[str, file.StoredPlan]) -> None:
    try:
        file.save_plan(path, stored)
    except OSError as error:
        log.warning("The plan is followed, but %s could not be written: %s.", path, error)


def _new_plan(
    gm: fx.GraphModule, inputs: Sequence[object], prices: Prices
) -> file.StoredPlan | None:
    """A plan made now; None, with a warning, where there is none."""
    try:
        with dtensor_planning.remembered_ways():
            recorded = record(gm, inputs)
            made = plan(recorded.program, recorded.schemas, recorded.meshes, prices)
    except PlanError as error:
        log.warning("Compiled without a plan. %s", error)
        return None
    log.info(
        "planned %d steps in %.1f s: communication %.0f -> %.0f us, modelled; gap %.2f %%",
        len(made.program.steps),
        made.seconds,
        made.upstream_us[0],
        made.planned_us[0],
        100 * made.gap,
    )
    return file.StoredPlan.of(made)


def fingerprint(gm: fx.GraphModule, inputs: Sequence[object]) -> str:
    """Return a hash of a graph's operations and of its inputs' shapes, placements and meshes."""
    parts = [gm.print_readable(print_output=False), torch.__version__, str(dist.get_world_size())]
    for given in inputs:
        if isinstance(given, torch.Tensor):
            parts.append(f"{tuple(given.shape)} {given.dtype} {given.requires_grad}")
        if isinstance(given, DTensor):
            mesh = given.device_mesh
            parts.append(
                f"{given.placements} {mesh.device_type} {dtensor_placements.mesh_info(mesh)}"
            )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _plan_error(error: BaseException | None) -> PlanError | None:
    while error is not None and not isinstance(error, PlanError):
        error = error.__cause__ or error.__context__
    return error
