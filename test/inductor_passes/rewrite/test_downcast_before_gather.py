import pytest
import torch
from expecttest import assert_expected_inline

from inductor_passes.rewrite import DowncastBeforeGather
from inductor_passes.testing import dump

c10d = torch.ops._c10d_functional
prims = torch.ops.prims


def gather(x, ranks=4):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, "0"))


def cast(x, dtype=torch.bfloat16):
    return prims.convert_element_type(x, dtype)


def test_a_parameter_travels_in_the_type_it_is_used_in(on_all_ranks):
    def linear(rank, x, w):
        return x @ cast(gather(w)).t().float()

    record, graph, payloads = on_all_ranks(DowncastBeforeGather(), linear, [3, 8], [2, 8])
    assert payloads == [64, 32]
    assert record.counters == {"launches_narrowed": 1, "bytes_saved": 32}
    assert_expected_inline(
        dump(graph),
        """\
arg0_1: [3, 8]
arg1_1: [2, 8]
convert_element_type_default: [2, 8] = convert_element_type(arg1_1, torch.bfloat16)
all_gather_into_tensor: [8, 8] = all_gather_into_tensor(convert_element_type_default, 4, 0)
wait_tensor: [8, 8] = wait_tensor(all_gather_into_tensor)
t: [8, 8] = t(wait_tensor)
_to_copy: [8, 8] = _to_copy(t, dtype=torch.float32)
mm: [3, 8] = mm(arg0_1, _to_copy)
return mm""",
    )


def test_through_the_joining_of_an_inner_dimension(on_all_ranks):
    def inner(rank, w):
        whole = torch.cat(gather(w).chunk(4), 1)
        return cast(whole), cast(whole.t())

    _, _, payloads = on_all_ranks(DowncastBeforeGather(), inner, [2, 8])
    assert payloads == [64, 32]


@pytest.mark.parametrize(
    "program",
    [
        lambda rank, w: (cast(gather(w)), gather(w) + 1),  # two gathers: one of each kind
        lambda rank, w: gather(w),  # returned wide
        lambda rank, w: cast(gather(w), torch.float64),
    ],
)
def test_what_is_read_wide_stays_wide(on_all_ranks, program):
    _, _, payloads = on_all_ranks(DowncastBeforeGather(), program, [2, 8])
    assert payloads[1] in (payloads[0], payloads[0] * 3 // 4)


def test_one_wide_reader_is_enough_to_leave_it(on_all_ranks):
    def both(rank, w):
        whole = gather(w)
        return cast(whole), whole + 1

    record, _, _ = on_all_ranks(DowncastBeforeGather(), both, [2, 8])
    assert not record.changed
