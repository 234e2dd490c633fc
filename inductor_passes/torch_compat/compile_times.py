"""Where the seconds of a process's compiles went, by stage, from torch's own timers."""

from __future__ import annotations

from collections.abc import Mapping

import torch._dynamo.utils as _dynamo_utils

from inductor_passes.torch_compat.dynamo import WAIT_TIMER

# Names of torch's timers, seen in 2.13. One that is missing counts as 0, and what it would
# have timed as the stage around it.
_FRAMES, _BACKEND = "_compile.compile_inner", "OutputGraph.call_user_compiler"
_GUARDS = "build_guards"
_AOT, _LATE_BACKWARD = "create_aot_dispatcher_function", "backward._backward_impl"
_INDUCTOR, _BACKWARD = "compile_fx_inner", "compile_fx.<locals>.bw_compiler"
_JOINT, _AFTER = "_recursive_joint_graph_passes", "_recursive_post_grad_passes"
_OURS = (
    "pass.joint_graph_passes.joint_custom_pre_pass",
    "pass.joint_graph_passes.joint_custom_post_pass",
    "pass.post_grad_passes.post_grad_custom_pre_pass",
    "pass.post_grad_passes.post_grad_custom_post_pass",
)
_NATIVE = "PyCodeCache.load_by_key_path"


def seconds_by_stage() -> dict[str, float]:
    """Seconds of this process's compiles so far, by stage; empty before the first one."""
    return stages(
        {name: sum(times) for name, times in _dynamo_utils.compilation_time_metrics.items()}
    )


def stages(timers: Mapping[str, float]) -> dict[str, float]:
    """Stages, which add up to all, of torch's timers, which lie in each other.

    Waits count as such: they are in the passes where ranks agree on an order, and in the look-up of
    code that another rank makes.
    """

    def of(*names: str) -> float:
        return sum(timers.get(name, 0.0) for name in names)

    if not of(_FRAMES):
        return {}
    # A backward graph is compiled in AOTAutograd, or by its first call.
    late = min(of(_LATE_BACKWARD), of(_BACKWARD))
    voting, waiting = (of(f"{WAIT_TIMER}.{name}") for name in ("votes", "compile"))
    found = {
        "Dynamo's trace": of(_FRAMES) - of(_BACKEND) - of(_GUARDS),
        "guards": of(_GUARDS),
        "AOTAutograd": of(_AOT) - (of(_INDUCTOR) - late) - of(_JOINT) - waiting,
        "torch's graph passes": of(_JOINT, _AFTER) - of(*_OURS),
        "the plugin's passes": of(*_OURS) - voting,
        "waiting for other ranks": voting + waiting,
        "Inductor's code": of(_INDUCTOR) - of(_AFTER) - of(_NATIVE),
        "C++ or Triton": of(_NATIVE),
    }
    found = {name: max(seconds, 0.0) for name, seconds in found.items()}
    return {**found, "the rest": max(of(_FRAMES) + late - sum(found.values()), 0.0)}
