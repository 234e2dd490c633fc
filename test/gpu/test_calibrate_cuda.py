"""On GPUs: times by events, a topology file that loads, and predictions that are what was
measured.
"""

import json

import pytest
import torch
import torch.distributed as dist

from inductor_passes.__main__ import main
from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.measure_device import CudaClock, measure_device

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_device_alone():
    times = measure_device(CudaClock(0), seconds=5)
    assert {"float32", "float64", "bfloat16", "float16"} <= times.products.keys()
    if torch.cuda.get_device_capability() >= (8, 9):
        assert "float8" in times.products
    half = times.products["bfloat16"]
    assert half[1, 8192, 8192, 8192] > half[1, 4096, 4096, 4096] > half[1, 256, 256, 256]
    # A GPU does a small kernel in a few microseconds, and no host comes between those of a graph.
    assert 0.1 < times.kernel_us < 20
    assert times.attention_us > times.kernel_us


@pytest.mark.skipif(
    torch.cuda.device_count() > 1, reason="several devices: their links are measured too"
)
def test_one_gpu_takes_links_from_the_base(tmp_path):
    out = tmp_path / "mine.json"
    assert main(["costs", "measure", "--out", str(out), "--seconds", "5"]) == 0
    topology, base = load_topology(out), load_topology("h100x8")
    assert topology.protocols == base.protocols
    assert dict(topology.sources)["device.kernel_us"].startswith("measured, median sample")


@pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not dist.is_nccl_available(),
    reason="needs two CUDA devices and NCCL",
)
def test_links_of_one_host(tmp_path):
    out = tmp_path / "mine.json"
    assert main(["costs", "measure", "--out", str(out), "--seconds", "20"]) == 0
    topology, count = load_topology(out), torch.cuda.device_count()
    assert topology.ranks_per_node == count
    for entry in json.loads(out.read_text())["links"]["measured"]:
        payload, us = entry["points"][-1]
        shape = GroupShape(entry["ranks"], entry["nodes"])
        assert collective_us(entry["kind"], payload, shape, topology) == pytest.approx(us, rel=0.01)
