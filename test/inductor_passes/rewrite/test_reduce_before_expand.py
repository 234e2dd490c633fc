import torch
from expecttest import assert_expected_inline

from inductor_passes.rewrite import ReduceBeforeExpand
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional


def reduced(x, op="sum"):
    return c10d.wait_tensor(c10d.all_reduce(x, op, "0"))


def test_a_broadcast_row_is_reduced_once(on_all_ranks):
    def program(rank, x):
        return reduced(x.unsqueeze(1).expand(2, 16, 8).contiguous().view(32, 8)) * 2

    record, graph, payloads = on_all_ranks(ReduceBeforeExpand(), program, [2, 8], exact=False)
    assert payloads == [1024, 64]
    assert record.counters == {"launches_shrunk": 1, "bytes_saved": 960}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [2, 8]
unsqueeze: [2, 1, 8] = unsqueeze(arg0_1, 1)
all_reduce_default: [2, 1, 8] = all_reduce(unsqueeze, sum, 0)
wait_tensor_default: [2, 1, 8] = wait_tensor(all_reduce_default)
expand_default: [2, 16, 8] = expand(wait_tensor_default, [2, 16, 8])
clone_default: [2, 16, 8] = clone(expand_default, memory_format=torch.contiguous_format)
view_default: [32, 8] = view(clone_default, [32, 8])
mul: [32, 8] = mul(view_default, 2)
return mul""",
    )


def test_every_reduction(on_all_ranks):
    for op in ("avg", "max", "min"):

        def program(rank, x, op=op):
            return reduced(x.expand(16, 8), op)

        _, _, payloads = on_all_ranks(ReduceBeforeExpand(), program, [1, 8], exact=False)
        assert payloads == [512, 32]


def test_a_plain_sum_is_left_alone(on_all_ranks):
    def program(rank, x):
        return reduced(x.t().contiguous().view(4, 4))

    record, _, _ = on_all_ranks(ReduceBeforeExpand(), program, [2, 8])
    assert not record.changed


def test_what_views_the_sum_finds_it_dense(on_all_ranks):
    def program(rank, x):
        return reduced(x.expand(4, -1, -1)).view(8, 8) * 2

    record, _, _ = on_all_ranks(ReduceBeforeExpand(), program, [2, 8], exact=False)
    assert record.changed
