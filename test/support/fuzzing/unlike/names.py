"""What the source of a program may use, made anew for each job."""

from __future__ import annotations

import linecache
import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from fuzzing.unlike.program import Program
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


def names_of(program: Program, rank: int) -> dict[str, Any]:
    """Groups ``WORLD``, ``ALT``, ``DP``, ``TP``, their meshes (``WORLDM`` ...), and the
    program's functions.
    """
    dims = ("dp", "tp")[: len(program.mesh)]
    mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=dims)
    whole = init_device_mesh("cpu", (program.ranks,)) if len(dims) > 1 else mesh
    names: dict[str, Any] = {
        "ColwiseParallel": ColwiseParallel,
        "DDP": DistributedDataParallel,
        "DTensor": DTensor,
        "MESH": mesh,
        "Partial": Partial,
        "Replicate": Replicate,
        "RowwiseParallel": RowwiseParallel,
        "Shard": Shard,
        "WORLD": dist.group.WORLD,
        "WORLDM": whole,
        "ALT": dist.new_group(list(range(program.ranks))),
        "ALTM": whole,
        "dist": dist,
        "fc": fc,
        "fully_shard": fully_shard,
        "log": logging.getLogger("program"),
        "parallelize_module": parallelize_module,
        "torch": torch,
    }
    for dim in dims:
        names[dim.upper()] = mesh.get_group(dim)
        names[f"{dim.upper()}M"] = mesh[dim]
    file = f"<program {program.seed}{f' of rank {rank}' if program.own_file else ''}>"
    linecache.cache[file] = (len(program.source), None, program.source.splitlines(True), file)
    exec(compile(program.source, file, "exec"), names)
    return names
