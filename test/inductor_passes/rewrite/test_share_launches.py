import torch
from expecttest import assert_expected_inline

from inductor_passes.rewrite import ShareLaunches
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional


def gather(x, ranks=4):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, "0"))


def test_one_gather_for_two_readers(on_all_ranks):
    def program(rank, x, w):
        return (x @ gather(w)).relu() @ gather(w)

    record, graph, payloads = on_all_ranks(ShareLaunches(), program, [3, 8], [2, 8])
    assert payloads == [128, 64]
    assert record.counters == {"launches_removed": 1, "bytes_saved": 64}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [3, 8]
arg1_1: [2, 8]
all_gather_into_tensor: [8, 8] = all_gather_into_tensor(arg1_1, 4, 0)
wait_tensor: [8, 8] = wait_tensor(all_gather_into_tensor)
mm: [3, 8] = mm(arg0_1, wait_tensor)
relu: [3, 8] = relu(mm)
mm_1: [3, 8] = mm(relu, wait_tensor)
return mm_1""",
    )


def test_a_reader_above_the_first_wait(on_all_ranks):
    def program(rank, w):
        first = c10d.all_gather_into_tensor(w, 4, "0")
        early = gather(w) + 1
        return c10d.wait_tensor(first) * early

    record, _, _ = on_all_ranks(ShareLaunches(), program, [2, 8])
    assert record.changed


def test_other_sources_and_large_results_stay(on_all_ranks):
    record, _, _ = on_all_ranks(
        ShareLaunches(), lambda rank, v, w: (gather(v), gather(w)), [2, 8], [2, 8]
    )
    assert not record.changed
    record, _, _ = on_all_ranks(
        ShareLaunches(budget_bytes=255), lambda rank, v: (gather(v), gather(v)), [2, 8]
    )
    assert not record.changed
