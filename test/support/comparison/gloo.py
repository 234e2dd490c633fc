"""Programs on real ranks, which are processes joined by gloo: ten models, and collectives of DTensors.

Threads that stand for ranks hand a tensor to their group as it is, where a real group goes through the
dispatcher; what a DTensor becomes on that way shows here alone.
"""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comparison.outcome import End, compare, end_of

MODELS = (
    "llama",
    "qwen3",
    "gemma3_text",
    "exaone4",
    "mixtral",
    "deepseek_v3",
    "phi3",
    "cohere2",
    "qwen3_moe",
    "olmo2",
)
WAYS = ("training", "generating", "compiled_training")
SIZES = {
    "models-ranks": (2, 2),
    "dtensors-ranks": (4,),
}  # replicas of tensor-parallel ranks; one mesh
DEADLINE_S = 200


def names(part: str) -> list[str]:
    """Each of the models in each way; each program of collectives in eager mode."""
    if part == "models-ranks":
        return [f"{name}-{way}" for name in MODELS for way in WAYS]
    return sorted(_launches())


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Starts the ranks of a program, and merges what they say."""
    return lambda program: _on_ranks(part, program, side)


def _on_ranks(part: str, program: str, side: str) -> End:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", __file__, part, program, side, folder]
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment)
            for rank in range(math.prod(SIZES[part]))
        ]
        try:
            for rank in ranks:
                rank.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            return End("hang", f"a rank has not ended after {DEADLINE_S} s")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        said = [Path(folder, str(number)) for number in range(len(ranks))]
        if not all(path.exists() for path in said):
            return End("crash", "a rank ended without a word")
        ends = [End.from_json(json.loads(path.read_text())) for path in said]
    worst = [end for status in ("wrong", "error") for end in ends if end.status == status]
    return [*worst, *ends][0]


def _launches() -> dict[str, Any]:
    from comparison import dtensors

    known = dtensors.known()
    return {name: each for name, each in known.items() if "gloo" in each.backends}


def _rank(part: str, program: str, side: str, folder: str, rank: int) -> End:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    if side == "ours":
        import dynamo_dist

        dynamo_dist.enable()
    sizes = SIZES[part]
    world = math.prod(sizes)
    store = dist.FileStore(f"{folder}/store", world)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    mesh: Any = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    torch.manual_seed(0)
    if part == "dtensors-ranks":
        pairs = _launches()[program].run(mesh, rank, lambda function: function)
    else:
        from comparison import models

        models.quiet()
        name, way = program.rsplit("-", 1)
        pairs = models.pairs(name, way, mesh)
    for found, expected in pairs:
        if problem := compare(found, expected, f"rank {rank}", 1e-5):
            return End("wrong", problem)
    return End("right")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    _part, _program, _side, _folder, _number = sys.argv[1:]
    try:
        _end = _rank(_part, _program, _side, _folder, int(_number))
    except Exception as error:
        _end = end_of(error)
    Path(_folder, _number).write_text(json.dumps(_end.to_json()))
    os._exit(0)  # a peer that has failed is not waited for
