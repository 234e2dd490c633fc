"""A rescaled topology: every time of its kernels or of its links is stretched, nothing else."""

import sys
from pathlib import Path

import pytest

from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.topology import shipped_topologies

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
from rescale import write_rescaled


def both(tmp_path, name, **factors):
    path = tmp_path / "slower.json"
    write_rescaled(name, path, name="slower", **factors)
    return load_topology(name), load_topology(path)


@pytest.mark.parametrize("name", shipped_topologies())
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("payload", [64, 2**20, 2**28])
@pytest.mark.parametrize("shape", [GroupShape(8, 1), GroupShape(16, 2)])
def test_links_take_that_many_times_as_long(tmp_path, name, kind, payload, shape):
    base, slower = both(tmp_path, name, links=3.0)
    expected = 3.0 * collective_us(kind, payload, shape, base)
    assert collective_us(kind, payload, shape, slower) == pytest.approx(expected)
    assert slower.kernel_us == base.kernel_us and slower.matmul == base.matmul


@pytest.mark.parametrize("name", shipped_topologies())
def test_kernels_take_that_many_times_as_long(tmp_path, name):
    base, slower = both(tmp_path, name, compute=2.0)
    assert slower.kernel_us == pytest.approx(2.0 * base.kernel_us)
    assert slower.memory_gb_per_s == pytest.approx(base.memory_gb_per_s / 2.0)
    for (_, was), (_, now) in zip(base.matmul, slower.matmul, strict=True):
        assert now.flops_per_us == pytest.approx(was.flops_per_us / 2.0)
    assert slower.attention_efficiency == base.attention_efficiency
    assert slower.intra_gb_per_s == base.intra_gb_per_s


def test_what_was_measured_is_stretched_too(tmp_path):
    base, slower = both(tmp_path, "h100x8", compute=2.0, links=3.0)
    assert len(base.collectives) == len(slower.collectives)
    for was, now in zip(base.collectives, slower.collectives, strict=True):
        assert now.us(2**22) == pytest.approx(3.0 * was.us(2**22))
    for was, now in zip(base.products, slower.products, strict=True):
        assert [us for _, us in now.points] == pytest.approx([2.0 * us for _, us in was.points])


def test_sources_say_so(tmp_path):
    _, slower = both(tmp_path, "cpu-gloo", links=3.0)
    sources = dict(slower.sources)
    assert sources["links.intra_node_gb_per_s"].endswith("; 3 times as slow")
    assert sources["ranks_per_node"] == dict(load_topology("cpu-gloo").sources)["ranks_per_node"]
