import pytest
import torch
from expecttest import assert_expected_inline

from inductor_passes.rewrite import GatherWithoutCopy
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def gather(x, dim, ranks=4):
    whole = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), ranks, "0"))
    return torch.cat(whole.chunk(ranks), dim)


def test_a_transposed_weight_is_gathered_as_it_lies(on_all_ranks):
    def program(rank, x, w):
        return x @ gather(w.t(), 1)

    record, graph, _ = on_all_ranks(GatherWithoutCopy(), program, [3, 8], [2, 8], exact=False)
    assert record.counters == {"copies_removed": 1, "bytes_saved": 64 + 256}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [3, 8]
arg1_1: [2, 8]
all_gather_into_tensor_default: [8, 8] = all_gather_into_tensor(arg1_1, 4, 0)
wait_tensor_default: [8, 8] = wait_tensor(all_gather_into_tensor_default)
permute_default: [8, 8] = permute(wait_tensor_default, [1, 0])
mm: [3, 8] = mm(arg0_1, permute_default)
return mm""",
    )


@pytest.mark.parametrize(("shape", "dim"), [([3, 2], 1), ([3, 5, 2], 2), ([3, 5, 2], 1)])
def test_joined_by_index(on_all_ranks, shape, dim):
    _, graph, _ = on_all_ranks(GatherWithoutCopy(), lambda rank, x: gather(x, dim) + 1, shape)
    assert not any(node.target is aten.cat.default for node in graph.nodes)


def test_a_single_row_is_a_view(on_all_ranks):
    record, graph, _ = on_all_ranks(
        GatherWithoutCopy(), lambda rank, x: gather(x, 1) + 1, [1, 5, 2]
    )
    assert record.counters == {"copies_removed": 1, "bytes_saved": 160}
    assert not any(node.target is aten.clone.default for node in graph.nodes)


def test_a_transposed_weight_that_a_view_reads_is_copied_once(on_all_ranks):
    def program(rank, w):
        return gather(w.permute(1, 2, 0), 2).view(-1)

    _, graph, _ = on_all_ranks(GatherWithoutCopy(), program, [2, 8, 3])
    assert sum(node.target is aten.clone.default for node in graph.nodes) == 1


def test_first_dimension_and_other_orders_are_left_alone(on_all_ranks):
    def swapped(rank, x):
        a, b, c, d = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 4, "0")).chunk(4)
        return torch.cat([b, a, c, d], 1)

    record, _, _ = on_all_ranks(GatherWithoutCopy(), swapped, [2, 8])
    assert not record.changed
