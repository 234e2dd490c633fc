"""One rank as a process of its own: real spinning on memory shared with the other ranks, in the
interpreter.

usage: rank_worker.py FOLDER RANK WORLD [dies]
Each rank's buffer is a file in FOLDER that all map. Prints one line of JSON.
"""

import json
import sys
import time
from pathlib import Path

import torch

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import all_gather_matmul as gather
from inductor_passes.fused.kernels import all_reduce_add_norm as norm
from inductor_passes.fused.kernels import device
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels.all_reduce_add_norm import Norm
from inductor_passes.fused.kernels.tiles import Tiles
from inductor_passes.fused.kernels.workspace import Workspace, bytes_needed

FOLDER, RANK, WORLD = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
TILES = Tiles(16, 16, 16, warps=4, stages=1)
CALLS = 4
BYTES = bytes_needed(1 << 14)


def shared_workspace(family, spin_limit=200_000):
    buffers = [
        torch.from_file(str(FOLDER / f"{family}.{r}"), shared=True, size=BYTES, dtype=torch.uint8)
        for r in range(WORLD)
    ]
    return Workspace(
        family, buffers, RANK, programs=2, spin_limit=spin_limit, mode=device.INTERPRETER.value
    )


def of_rank(rank, call, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 * call + rank))


def slow_reader():
    """This rank reads what its peers have sent so late that they are in their next call by then."""

    def late(original):
        def helper(*args):
            time.sleep(0.02)
            return original(*args)

        return helper

    for module, name in (
        (device, "sum_over_ranks"),
        (gather, "tile_product"),
        (scatter, "add_chunks"),
    ):
        setattr(module, name, late(getattr(module, name)))


def add_norm(space, call):
    x = [of_rank(r, call, 3, 20) for r in range(WORLD)]
    residual, weight = of_rank(50, call, 3, 20), of_rank(51, call, 20)
    terms = Norm(residual, weight=weight)
    y, *_ = norm.launch_all_reduce_add_norm(x[RANK], terms, space, two_shot=call % 2 == 0)
    total = sum(x) + residual
    return y, torch.nn.functional.rms_norm(total, (20,), weight, 1e-5)


def gather_matmul(space, call):
    a = [of_rank(r, call, 20, 16) for r in range(WORLD)]
    weight = of_rank(50, call, 16, 16)
    (got,) = gather.launch_all_gather_matmul(
        a[RANK], [weight], [], space, tiles=TILES, copiers=1, copy_block=64
    )
    return got, torch.cat(a) @ weight


def matmul_scatter(space, call):
    a = [of_rank(r, call, WORLD * 16, 16) for r in range(WORLD)]
    b = [of_rank(60 + r, call, 16, 16) for r in range(WORLD)]
    got = scatter.launch_matmul_reduce_scatter(
        a[RANK], b[RANK], space, average=False, tiles=TILES, block=64
    )
    return got, sum(x @ y for x, y in zip(a, b, strict=True)).view(WORLD, 16, 16)[RANK]


FAMILIES = {
    "all_reduce_add_norm": add_norm,
    "all_gather_matmul": gather_matmul,
    "matmul_reduce_scatter": matmul_scatter,
}


def work():
    if RANK == 0:
        slow_reader()
    error, bits = 0.0, {}
    for family, run in FAMILIES.items():
        space = shared_workspace(family)
        for call in range(CALLS):
            time.sleep(0.05 * ((RANK + call) % 3))  # nobody comes at the same time
            got, wanted = run(space, call)
            space.raise_if_failed()
            error = max(error, (got - wanted).abs().max().item())
        bits[family] = got.view(torch.int32).sum(dtype=torch.int64).item()
    return {"error": error, "bits": bits}


def meet():
    """Return when every rank is here: a rank that is still starting must not seem dead."""
    (FOLDER / f"here.{RANK}").touch()
    while not all((FOLDER / f"here.{r}").exists() for r in range(WORLD)):
        time.sleep(0.01)


def mourn():
    space = shared_workspace("all_reduce_add_norm", spin_limit=5_000)
    meet()
    if RANK == WORLD - 1:
        return {"error": "died"}
    start = time.monotonic()
    got, _ = add_norm(space, 1)
    try:
        space.raise_if_failed()
    except KernelError as error:
        message = str(error)
    else:
        message = ""
    seconds = time.monotonic() - start
    return {"error": message, "nan": bool(torch.isnan(got).all()), "seconds": seconds}


print(json.dumps(mourn() if "dies" in sys.argv else work()))
