"""Ten of the models on real ranks: processes joined by gloo, two replicas of two tensor-parallel ranks."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beside_stock.outcome import End, compare, end_of

NAMES = (
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
WAYS = ("training", "generating", "compiled_training", "data_parallel")
SIZES = (2, 2)
DEADLINE_S = 200


def names(part: str) -> list[str]:
    """Each model in each way."""
    return [f"{name}-{way}" for name in NAMES for way in WAYS]


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Starts the ranks of a program, and merges what they say."""

    def run(program: str) -> End:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-W", "ignore", __file__, program, side, folder]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(sys.path),
            }
            ranks = [
                subprocess.Popen([*command, str(rank)], env=environment)
                for rank in range(SIZES[0] * SIZES[1])
            ]
            try:
                for rank in ranks:
                    rank.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                return End("hang", f"a rank has not ended after {DEADLINE_S} s")
            finally:
                for rank in ranks:
                    rank.kill()
            said = [Path(folder, str(rank)) for rank in range(len(ranks))]
            if not all(path.exists() for path in said):
                return End("crash", "a rank ended without a word")
            ends = [End.from_json(json.loads(path.read_text())) for path in said]
            return next((end for end in ends if end.status == "wrong"), None) or next(
                (end for end in ends if end.status != "right"), ends[0]
            )

    return run


def _rank(program: str, side: str, folder: str, rank: int) -> End:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from beside_stock import models
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    if side == "ours":
        import dynamo_dist

        dynamo_dist.enable()
    models._quiet()
    store = dist.FileStore(f"{folder}/store", SIZES[0] * SIZES[1])
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=SIZES[0] * SIZES[1],
        timeout=timedelta(seconds=60),
    )
    mesh: Any = init_device_mesh("cpu", SIZES, mesh_dim_names=("dp", "tp"))
    name, way = program.rsplit("-", 1)
    if way == "data_parallel" and side == "stock":
        return End("unfit", "stock has no such function")
    for found, expected in models.pairs(name, way, mesh):
        if problem := compare(found, expected, f"rank {rank}", 1e-5):
            return End("wrong", problem)
    return End("right")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    _program, _side, _folder, _number = sys.argv[1:]
    try:
        _end = _rank(_program, _side, _folder, int(_number))
    except Exception as error:
        _end = end_of(error)
    Path(_folder, _number).write_text(json.dumps(_end.to_json()))
    os._exit(0)  # a peer that has failed is not waited for
