"""The command on scripts whose ranks agree, and on one whose ranks do not."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

UNEVEN = """
import torch, torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))

def sharded(*placements):
    return distribute_tensor(torch.randn(130, 64), mesh, placements, src_data_rank=None)

weights = [torch.nn.Parameter(sharded(Shard(0), Shard(1))) for _ in range(3)]
x = sharded(Shard(0), Replicate())

@torch.compile(fullgraph=True)
def loss(x, weights):
    total = 0
    for w in weights:
        whole = w.redistribute(placements=[Replicate(), Shard(1)])
        total = total + (x @ whole.redistribute(placements=[Replicate(), Replicate()]).t()).sum()
    return total

loss(x, weights).full_tensor().backward()
"""

DIFFERENT = """
import os, torch, torch.distributed as dist
import torch.distributed._functional_collectives as fc

dist.init_process_group("gloo")

@torch.compile(fullgraph=True)
def step(x):
    return fc.all_reduce(x * 2, "sum", dist.group.WORLD)

step(torch.ones(4 + (dist.get_rank() == 1)))
"""


def verify(tmp_path, script, *arguments):
    path = tmp_path / "script.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "inductor_passes", "verify-ranks", *arguments, "--json", str(path)],
        capture_output=True,
        text=True,
    )
    return done.returncode, json.loads(done.stdout)


def test_uneven_shards_come_out_equal_on_all_ranks(tmp_path):
    status, result = verify(tmp_path, UNEVEN, "--world-size", "8", "--mesh", "4x2")
    assert (status, result["ok"], result["errors"]) == (0, True, [])
    assert len(result["ranks_traced"]) == 8
    for graph in result["graphs"]:
        assert graph["acyclic"] and all(group["equal"] for group in graph["groups"])
    assert {graph["graph"].partition(":")[2] for graph in result["graphs"]} == {
        "forward",
        "backward",
    }


def test_ranks_that_differ_are_named_with_the_launch(tmp_path):
    status, result = verify(tmp_path, DIFFERENT, "--world-size", "2")
    assert (status, result["ok"]) == (1, False)
    assert "rank 0: all_reduce sum of 16 bytes" in result["differences"][0]
    assert "rank 1: all_reduce sum of 20 bytes" in result["differences"][0]


def test_a_script_that_fails_is_said_to(tmp_path):
    status, result = verify(tmp_path, "raise ValueError('no such model')", "--world-size", "2")
    assert status == 2 and "Rank 0: ValueError: no such model" in result["errors"][0]
