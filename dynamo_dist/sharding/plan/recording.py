"""Trace a Dynamo graph once by stock's rules, and keep what DTensor did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.program import Program
from dynamo_dist.sharding.plan.accesses import accesses_of
from dynamo_dist.sharding.plan.trace import Session, bracketed
from dynamo_dist.torch_compat import aot_tracing, dtensor_placements


@dataclass(frozen=True, slots=True)
class Recording:
    """The program, and of each step what DTensor would be asked about it."""

    program: Program
    schemas: list[Any]
    meshes: list[DeviceMesh]


def record(gm: fx.GraphModule, inputs: Sequence[Any]) -> Recording:
    """Every operation of the forward and, if it is trained, of the backward of a Dynamo graph.

    Call it where a ``torch.compile`` backend is called. Nothing is compiled or run.
    """
    session = Session()
    with session.active():
        aot_tracing.trace_only(bracketed(gm, inputs), inputs)
    # Not while tracing, where a mesh cannot be looked at.
    session.program.meshes.extend(dtensor_placements.mesh_info(mesh) for mesh in session.meshes)
    session.program.accesses.extend(accesses_of(session.program, session.schemas))
    return Recording(session.program, session.schemas, session.meshes)
