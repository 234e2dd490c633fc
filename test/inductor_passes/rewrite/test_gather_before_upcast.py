import pytest
import torch
from expecttest import assert_expected_inline

from inductor_passes.errors import InvariantError
from inductor_passes.pipeline import run_pass
from inductor_passes.rewrite import GatherBeforeUpcast
from inductor_passes.rewrite.narrow_gathers import keeps_values
from inductor_passes.testing import dump, trace

c10d = torch.ops._c10d_functional
prims = torch.ops.prims


def gather(x, ranks=4):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, "0"))


def cast(x, dtype):
    return prims.convert_element_type(x, dtype)


def test_a_head_is_gathered_in_its_own_type(on_all_ranks):
    def head(rank, x):
        return gather(cast(x, torch.float32)) * 2

    record, graph, payloads = on_all_ranks(GatherBeforeUpcast(), head, [2, 8], dtype=torch.bfloat16)
    assert payloads == [64, 32]
    assert record.counters == {"launches_narrowed": 1, "bytes_saved": 32}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [2, 8]
all_gather_into_tensor_default: [8, 8] = all_gather_into_tensor(arg0_1, 4, 0)
wait_tensor_default: [8, 8] = wait_tensor(all_gather_into_tensor_default)
convert_element_type_default: [8, 8] = convert_element_type(wait_tensor_default, torch.float32)
mul: [8, 8] = mul(convert_element_type_default, 2)
return mul""",
    )


def test_ranks_that_pad_decide_like_those_that_do_not(on_all_ranks):
    def uneven(rank, x):
        wide = cast(x, torch.float32)
        if rank == 3:  # one row of its own, one of padding
            wide = torch.ops.aten.constant_pad_nd(wide, [0, 0, 0, 1])
        return gather(wide)

    _, _, payloads = on_all_ranks(
        GatherBeforeUpcast(), uneven, lambda rank: [1 if rank == 3 else 2, 8], dtype=torch.bfloat16
    )
    assert payloads == [64, 32]


def test_a_wide_value_that_others_read_stays(on_all_ranks):
    def shared(rank, x):
        wide = cast(x, torch.float32)
        return gather(wide.t().contiguous()), wide + 1

    record, _, _ = on_all_ranks(GatherBeforeUpcast(), shared, [2, 8], dtype=torch.bfloat16)
    assert record.changed


@pytest.mark.parametrize(
    "program",
    [
        lambda rank, x: gather(cast(x, torch.bfloat16)),  # narrower already
        lambda rank, x: gather(x.float() * 2),  # made wide by arithmetic
        lambda rank, x: gather(torch.ops.aten.constant_pad_nd(cast(x, torch.float64), [0, 1], 0.1)),
    ],
)
def test_left_alone(on_all_ranks, program):
    record, _, _ = on_all_ranks(GatherBeforeUpcast(), program, [2, 8])
    assert not record.changed


def test_a_sum_is_not_narrowed():
    def summed(x):
        return c10d.wait_tensor(c10d.all_reduce(cast(x, torch.float32), "sum", "0"))

    graph = trace(summed, [2, 8], dtype=torch.bfloat16)
    assert not run_pass(GatherBeforeUpcast(), graph).changed


@pytest.mark.parametrize(
    ("narrow", "wide", "keeps"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float16, torch.float32, True),
        (torch.int16, torch.bfloat16, False),
        (torch.int8, torch.float16, True),
        (torch.uint8, torch.int16, True),
        (torch.uint8, torch.int8, False),
        (torch.float8_e5m2, torch.float16, True),
        (torch.bool, torch.float32, True),
        (torch.float32, torch.int64, False),
    ],
)
def test_which_casts_keep_every_value(narrow, wide, keeps):
    assert keeps_values(narrow, wide) is keeps


class ForgetsTheCast(GatherBeforeUpcast):
    """Planted bug: the gathered value stays narrow."""

    def run(self, graph):
        stats = super().run(graph)
        wide = next(
            n for n in reversed(graph.nodes) if n.target is prims.convert_element_type.default
        )
        wide.replace_all_uses_with(wide.args[0])
        graph.erase_node(wide)
        return stats


def test_planted_bug_is_caught():
    def head(x):
        return gather(cast(x, torch.float32), 8) + 1

    graph = trace(head, [2, 8], dtype=torch.bfloat16)
    with pytest.raises(InvariantError, match="its op makes"):
        run_pass(ForgetsTheCast(), graph)
