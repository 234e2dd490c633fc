"""Given times in, figures and predictions out."""

import json
from dataclasses import replace

import pytest

from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.cost.importing import add_to, product_us
from inductor_passes.cost.measure_device import DeviceTimes
from inductor_passes.cost.measure_links import KINDS, Layout, LinkTimes
from inductor_passes.cost.measured_topology import tables_of, topology_of
from inductor_passes.cost.topology import dump_topology
from inductor_passes.errors import CalibrationError

MIB = 1 << 20
DEVICE = DeviceTimes(
    how="best",
    products={
        "float32": {(1, 512, 512, 512): 2 * 512**3 / 1e5, (1, 64, 64, 64): 50.0},  # 0.1 TFLOPS
        "bfloat16": {(1, 128, 128, 128): 2 * 128**3 / 1e4},  # 0.01 TFLOPS
    },
    attention_flops=4.0 * 4 * 512**2 * 64,
    attention_us=4 * 4 * 512**2 * 64 / 2.5e4,  # a quarter of float32's rate
    copy_bytes=64 * MIB,
    copy_us=2 * 64 * MIB / 1e4,  # 10 GB/s
    kernel_us=1.5,
)


def line(start, bytes_per_us):
    """Two points on a straight line."""
    return {4: start, 16 * MIB: start + (16 * MIB - 4) / bytes_per_us}


def on_one_host():
    pair = GroupShape(2, 1)
    tables = {(kind, pair): line(100.0, 1e3) for kind in KINDS}  # 1 GB/s
    tables["all_reduce", pair] = line(130.0, 2e3)
    return LinkTimes(Layout(2, 1), "cpu", "best", tables)


def on_two_hosts():
    """Four ranks: a step within a host takes 10 us and across 40; 2 GB/s within, a link of 0.5
    GB/s a rank.
    """
    tables = {}
    for shape, gather, reduce, rate in (
        (GroupShape(2, 1), 100.0, 110.0, 2e3),
        (GroupShape(2, 2), 130.0, 170.0, 5e2),
        (GroupShape(4, 2), 150.0, 210.0, 5e2 * 2 / 3),
    ):
        tables |= {(kind, shape): line(gather, rate) for kind in KINDS}
        tables["all_reduce", shape] = line(reduce, rate)
    return LinkTimes(Layout(4, 2), "cuda", "median", tables)


def written(tmp_path, device, links, base="cpu-gloo", tables=True):
    content = topology_of(base, name="mine", where="a host", device=device, links=links)
    if tables:
        add_to(content, tables_of("a host", device, links))
    path = tmp_path / "mine.json"
    path.write_text(dump_topology(content))
    return load_topology(path)


def test_figures_follow_from_the_times_of_one_host(tmp_path):
    topology = written(tmp_path, DEVICE, on_one_host(), tables=False)
    assert topology.matmul_rate("float32").peak_tflops == 0.1
    assert topology.matmul_rate("bfloat16").peak_tflops == 0.01
    assert (topology.attention_efficiency, topology.memory_gb_per_s) == (0.25, 10.0)
    assert (topology.kernel_us, topology.intra_gb_per_s) == (1.5, 1.0)
    (protocol,) = topology.protocols
    assert (protocol.launch_us, protocol.intra_step_us) == (70.0, 30.0)
    own = topology.all_reduce_in_node
    assert (own.launch_us, own.gb_per_s) == (130.0, 2.0)
    # What one CPU host cannot show is the base's, and says so.
    sources = dict(topology.sources)
    assert topology.ranks_per_node == 64 and topology.inter_gb_per_s == 0.125
    for path in (
        "ranks_per_node",
        "links.inter_node_gb_per_s",
        "device.matmul.float64.peak_tflops",
    ):
        assert sources[path].startswith("not measured here, taken from topology 'cpu-gloo': ")
    assert sources["device.kernel_us"].startswith("measured, best sample, a host: ")


def test_figures_follow_from_the_times_of_two_hosts(tmp_path):
    topology = written(tmp_path, None, on_two_hosts(), base="h100x8", tables=False)
    assert topology.ranks_per_node == 2
    (protocol,) = topology.protocols
    assert (protocol.launch_us, protocol.intra_step_us, protocol.inter_step_us) == (
        90.0,
        10.0,
        40.0,
    )
    assert (topology.intra_gb_per_s, topology.inter_gb_per_s) == (2.0, 0.5)
    # So the formulas give back what was measured.
    found = collective_us("all_gather", 16 * MIB, GroupShape(4, 2), topology)
    assert found == pytest.approx(150.0 + 16 * MIB / (5e2 * 2 / 3), rel=1e-3)


def test_hosts_of_one_rank_each_keep_the_base_within(tmp_path):
    shape = GroupShape(3, 3)
    tables = {(kind, shape): line(100.0, 1e3) for kind in KINDS}
    tables["all_reduce", shape] = line(140.0, 1e3)
    topology = written(tmp_path, None, LinkTimes(Layout(3, 3), "cpu", "best", tables), tables=False)
    (protocol,) = topology.protocols
    assert (protocol.launch_us, protocol.inter_step_us) == (60.0, 20.0)
    assert (topology.ranks_per_node, topology.inter_gb_per_s) == (1, 2.0)
    assert topology.intra_gb_per_s == load_topology("cpu-gloo").intra_gb_per_s


def test_topology_loads_where_all_its_tables_are_measured(tmp_path):
    first = topology_of(
        "cpu-gloo", name="first", where="a host", device=DEVICE, links=on_one_host()
    )
    add_to(first, tables_of("a host", DEVICE, on_one_host()))
    base = tmp_path / "first.json"
    base.write_text(dump_topology(first))
    # Formulas alone, as the errors of formulas are told before the new tables are added.
    again = written(tmp_path, DEVICE, on_one_host(), base=str(base), tables=False)
    assert not again.products and not again.collectives
    assert again.matmul_rate("float32").peak_tflops == 0.1


def test_the_model_predicts_what_was_measured(tmp_path):
    links = on_two_hosts()
    topology = written(tmp_path, DEVICE, links)
    for (kind, shape), points in links.tables.items():
        for payload, us in points.items():
            assert collective_us(kind, payload, shape, topology) == pytest.approx(us, rel=1e-3)
    for dtype, products in DEVICE.products.items():
        for shape, us in products.items():
            assert product_us(topology, dtype, shape) == pytest.approx(us, rel=1e-3)


def test_one_gpu_leaves_the_links_to_the_base(tmp_path):
    topology, base = written(tmp_path, DEVICE, None, base="h100x8"), load_topology("h100x8")
    assert topology.protocols == base.protocols and topology.intra_gb_per_s == base.intra_gb_per_s
    assert topology.ranks_per_node == 8
    # 8-bit floats were not measured: the base's rate and its table stay.
    assert topology.matmul_rate("float8_e4m3fn") == base.matmul_rate("float8_e4m3fn")
    assert topology.measured_product_us("float8", (1, 1024, 1024, 1024), 0.0) == 7.8
    borrowed = [s for path, s in topology.sources if path.startswith("links.")]
    assert all(s.startswith("not measured here, taken from topology 'h100x8': ") for s in borrowed)


def test_measuring_again_replaces_the_tables(tmp_path):
    content = topology_of("cpu-gloo", name="a", where="b", device=DEVICE, links=on_one_host())
    add_to(content, tables_of("b", DEVICE, on_one_host()))
    first = tmp_path / "first.json"
    first.write_text(json.dumps(content))
    slower = on_one_host()
    slower.tables["all_gather", GroupShape(2, 1)] = {4: 999.0, 64: 1000.0}
    again = written(tmp_path, DEVICE, slower, base=str(first))
    table = again.measured_collective("all_gather", 2, 1)
    assert table.points == ((4, 999.0), (64, 1000.0))


def test_noise_cannot_make_a_figure_impossible(tmp_path):
    noisy = on_one_host()
    noisy.tables["all_reduce", GroupShape(2, 1)] = {4: 60.0, MIB: 50.0}
    noisy.tables["all_gather", GroupShape(2, 1)] = {4: 100.0, MIB: 90.0}
    topology = written(tmp_path, DEVICE, noisy, tables=False)
    (protocol,) = topology.protocols
    assert min(protocol.launch_us, protocol.intra_step_us, topology.intra_gb_per_s) > 0
    assert topology.all_reduce_in_node.gb_per_s > 0


def test_groups_worth_measuring():
    layout = Layout.of(["a"] * 8 + ["b"] * 8)
    assert (layout.ranks, layout.nodes, layout.per_node) == (16, 2, 8)
    assert layout.groups_of(13) == {
        GroupShape(2, 1): [12, 13],
        GroupShape(4, 1): [12, 13, 14, 15],
        GroupShape(8, 1): list(range(8, 16)),
        GroupShape(2, 2): [5, 13],
        GroupShape(16, 2): list(range(16)),
    }
    assert list(layout.groups_of(0)) == list(layout.groups_of(13))
    assert Layout(6, 1).groups_of(3) == {GroupShape(2, 1): [2, 3], GroupShape(6, 1): list(range(6))}
    assert Layout(2, 2).groups_of(1) == {GroupShape(2, 2): [0, 1]}


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"]])
def test_uneven_jobs_are_refused(hosts):
    with pytest.raises(CalibrationError, match="not laid out evenly and in order: 2 on a, "):
        Layout.of(hosts)


def test_start_share_of_collectives_is_a_figure_of_the_device():
    def made(launching_us):
        links = replace(on_one_host(), launching_us=launching_us)
        return topology_of("h100x8", name="here", where="here", device=None, links=links)["device"]

    figure = made(123.4)["launching_us"]
    assert (
        figure["value"] == 123.4 and "processor time of the smallest collective" in figure["source"]
    )
    assert "launching_us" not in made(None)  # a GPU, whose host runs ahead
