import json

import pytest
import torch
from expecttest import assert_expected_inline

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.cost.topology import topology_text
from inductor_passes.rewrite import ScatterByExchange
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional


def exchange(topology="cpu-gloo"):
    return ScatterByExchange(TopologyCostModel(load_topology(topology)))


def scattered(x, op="sum", ranks=4):
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, op, ranks, "0"))


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [[8], [8, 3], [4, 2, 5]])
def test_each_rank_gets_its_part_of_the_sum(on_all_ranks, op, dtype, shape):
    def program(rank, x):
        return scattered(x.round() * 4, op) + 1  # sums that every type holds exactly

    record, _, payloads = on_all_ranks(exchange(), program, shape, dtype=dtype)
    assert record.counters["scatters_replaced"] == 1
    size = torch.Size(shape).numel() * dtype.itemsize
    assert record.counters["bytes_saved"] == size * 3 // 4
    assert payloads[0] == payloads[1]


def test_graph(on_all_ranks):
    def program(rank, x):
        return scattered(x, "avg") * 2

    _, graph, _ = on_all_ranks(exchange(), program, [8, 3], exact=False)
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [8, 3]
all_to_all_single_default: [8, 3] = all_to_all_single(arg0_1, [2, 2, 2, 2], [2, 2, 2, 2], 0)
wait_tensor_default: [8, 3] = wait_tensor(all_to_all_single_default)
view_default: [4, 2, 3] = view(wait_tensor_default, [4, 2, 3])
sum_dim_int_list: [2, 3] = sum(view_default, [0])
div_tensor: [2, 3] = div(sum_dim_int_list, 4)
mul: [2, 3] = mul(div_tensor, 2)
return mul""",
    )


def test_two_ranks_add_to_the_same_bit(on_all_ranks):
    def program(rank, x):
        return scattered(x, ranks=2)

    record, _, _ = on_all_ranks(exchange(), program, [512, 33], ranks=2)
    assert record.changed


@pytest.mark.parametrize(
    ("program", "dtype"),
    [
        (lambda rank, x: scattered(x, "max"), torch.float32),
        (lambda rank, x: scattered(x), torch.int64),
        (lambda rank, x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), torch.float32),
    ],
)
def test_others_are_left_alone(on_all_ranks, program, dtype):
    record, _, _ = on_all_ranks(exchange(), program, [8, 4], dtype=dtype)
    assert not record.changed


@pytest.mark.parametrize("pass_", [exchange("h100x8"), ScatterByExchange()])
def test_where_a_reduce_scatter_is_one_or_nothing_is_known(on_all_ranks, pass_):
    record, _, _ = on_all_ranks(pass_, lambda rank, x: scattered(x), [8, 4])
    assert not record.changed


def test_a_measured_exchange_that_is_slower_is_not_taken(on_all_ranks, measured_topology):
    """What was measured counts, not the rounds."""
    slower = {"all_to_all": 900.0, "reduce_scatter": 500.0}

    def program(rank, x):
        return scattered(x)

    record, _, _ = on_all_ranks(exchange(measured_topology(slower)), program, [8, 4])
    assert not record.changed
    faster = {"all_to_all": 300.0, "reduce_scatter": 500.0}
    record, _, _ = on_all_ranks(exchange(measured_topology(faster)), program, [8, 4])
    assert record.changed


@pytest.fixture
def measured_topology(tmp_path):
    """``cpu-gloo`` with microseconds of collectives of four ranks, whatever their size."""

    def write(us):
        content = json.loads(topology_text("cpu-gloo"))
        content["links"]["measured"] = [
            {
                "kind": kind,
                "ranks": 4,
                "nodes": 1,
                "source": "made up",
                "points": [[4, t], [4096, t + 1]],
            }
            for kind, t in us.items()
        ]
        path = tmp_path / "measured.json"
        path.write_text(json.dumps(content))
        return path

    return write
