"""List the patches of ``enable()``, in the order in which it applies them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from dynamo_dist import graph_compile, plugins, trackers
from dynamo_dist.diagnostics import live
from dynamo_dist.diagnostics.live import Listen
from dynamo_dist.runtime import calls, gradients, guards
from dynamo_dist.settings import BACKEND, DistConfig, digest
from dynamo_dist.sharding import registration, rules
from dynamo_dist.torch_compat import dynamo_compiler, dynamo_frames, inductor_cpp
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import c10d as lowering
from dynamo_dist.tracing import dtensor, eager_fallback, modules
from dynamo_dist.tracing import trackers as tracking

# A mesh that is being made there lacks what its tracker is asked for.
MESHES = Path("torch/distributed/device_mesh.py")

# Where functions are that may be compiled as they are; all others are traced in graphs of their
# callers, or run around them.
COMPILED = ("tracing/modules.py", "tracing/ddp_average.py", "tracing/fsdp2_gather.py")

# Where functions are that stand in for torch's dispatching, and call nothing of the user's; plugins
# name folders of theirs.
DISPATCHING = ("sharding/", "torch_compat/dtensor_")


def patches(config: DistConfig, options: Mapping[str, object] | None = None) -> list[Patch]:
    """Everything that enabling does to torch, in order; nothing is applied here.

    ``options``: ours for compiles by ``backend="inductor"``, where ``config.inductor`` asks for
    these.
    """
    return [
        dynamo_compiler.BackendEntryPoint(BACKEND),
        *tracking.patches(config),
        *lowering.patches(config),
        *dtensor.patches(config),
        *modules.patches(config),
        *guards.patches(),
        *eager_fallback.patches(),
        *calls.wrapping_patches(),
        *gradients.gradients_patches(),
        *calls.below_autograd_patches(),
        *rules.patches(config),
        *registration.patches(),
        *gradients.double_backward_patches(),  # around what sharding sets there
        *trackers.patches(),
        *live.patches(),
        Listen(),
        dynamo_compiler.CacheKeyTag(f"dynamo_dist-{digest(config)}"),
        *inductor_cpp.probed_once_a_host(),
        *inductor_cpp.few_libraries(),
        *graph_compile.patches(),
        dynamo_frames.SkippedFrames(),
        dynamo_frames.frames_left_alone(_runs_in_eager, _dispatches),
        *([graph_compile.taking(options or {})] if config.inductor else []),
    ]


@cache
def _runs_in_eager(file: str) -> bool:
    root = Path(__file__).parent
    path = Path(file)
    if path.parts[-3:] == MESHES.parts:
        return True
    if path.is_relative_to(root.parent / "inductor_passes"):
        return True
    return path.is_relative_to(root) and not any(
        path.is_relative_to(root / part) for part in COMPILED
    )


@cache
def _dispatches(file: str) -> bool:
    root = Path(__file__).parent.as_posix()
    folders = [Path(each.folder).as_posix() for each in plugins.frame_compilers if each.folder]
    starts = (*(f"{root}/{part}" for part in DISPATCHING), *(f"{folder}/" for folder in folders))
    return Path(file).as_posix().startswith(starts)
