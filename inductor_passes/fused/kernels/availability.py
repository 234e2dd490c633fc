"""Availability of fused kernels on a group, and the reason where there is none. Imports neither
triton nor CUDA.

The answer is the same on every rank of a homogeneous job: it depends on the installation, the kind
of device, and how groups lie on hosts, never on which group a rank is in.
"""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from inductor_passes.cost.collectives import shape_of_ranks
from inductor_passes.torch_compat import c10d
from inductor_passes.torch_compat.c10d import group_ranks, world_size

MAX_WORLD = 64
SECONDS_VARIABLE = "INDUCTOR_PASSES_KERNEL_WAIT_SECONDS"  # how long a kernel waits for a peer
LEAST_CAPABILITY = (8, 0)
NO_TRITON = "triton is not installed (pip install triton)"


def why_not(group_name: str, device_type: str) -> str:
    """Tell why fused kernels cannot run on a group's tensors; "" if they can."""
    if device_type != "cuda":
        return f"tensors are on {device_type}: fused kernels run on CUDA devices"
    reason = why_not_here()
    if reason:
        return reason
    ranks = group_ranks(group_name)
    if ranks is None:
        return f"there is no process group named {group_name!r}"
    if len(ranks) < 2:
        return "the group has one rank: nothing to wait for"
    if len(ranks) > MAX_WORLD:
        return f"the group has {len(ranks)} ranks, and flags have room for {MAX_WORLD}"
    per_host = ranks_per_host()
    if per_host is None:
        return "it is unknown which ranks share a host (torchrun sets LOCAL_WORLD_SIZE)"
    if shape_of_ranks(ranks, per_host, world_size() or 0).crosses_nodes:
        return "the group crosses hosts, whose devices cannot map each other's memory"
    return ""


def why_not_here() -> str:
    """Tell why no fused kernel can run in this process, whatever the group; "" if one can."""
    if not is_installed():
        return NO_TRITON
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        return "the CUDA device is older than capability 8.0"
    if not c10d.has_symmetric_memory():
        return "this torch has no symmetric memory"
    return peer_access_missing()


def is_installed() -> bool:
    """Return whether triton can be imported, without importing it."""
    return importlib.util.find_spec("triton") is not None


def ranks_per_host() -> int | None:
    """Ranks on each host: what torchrun says, or all if the job fits on this host's devices."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdigit() and int(told) > 0:
        return int(told)
    world = world_size()
    if world is not None and world <= torch.cuda.device_count():
        return world
    return None


@functools.cache
def peer_access_missing() -> str:
    """Name two devices of this host that cannot map each other's memory; "" if all can."""
    count = torch.cuda.device_count()
    for one in range(count):
        for other in range(count):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"devices {one} and {other} of this host have no peer access"
    return ""
