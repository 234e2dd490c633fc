import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import TestCase, run_tests

from inductor_passes.testing import dump, fake_group, trace

c10d = torch.ops._c10d_functional


def gathered_weight(x, w):
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return (x @ x) @ w_full


class TestTrace(TestCase):
    def test_graph_as_lines(self):
        self.assertExpectedInline(
            dump(trace(gathered_weight, [16, 16], [2, 16])),
            """\
x_1: [16, 16]
w_1: [2, 16]
all_gather_into_tensor: [16, 16] = all_gather_into_tensor(w_1, 8, 0)
wait_tensor: [16, 16] = wait_tensor(all_gather_into_tensor)
mm: [16, 16] = mm(x_1, x_1)
mm_1: [16, 16] = mm(mm, wait_tensor)
return mm_1""",
        )

    def test_several_outputs_and_keywords(self):
        def split_and_sum(x):
            left, right = x.split(2)
            return [left, torch.sum(right, dtype=torch.float64)]

        self.assertExpectedInline(
            dump(trace(split_and_sum, [4, 3])),
            """\
x_1: [4, 3]
split: ([2, 3], [2, 3]) = split(x_1, 2)
getitem: [2, 3] = getitem(split, 0)
getitem_1: [2, 3] = getitem(split, 1)
sum_1: [] = sum(getitem_1, dtype=torch.float64)
return [getitem, sum_1]""",
        )

    def test_dynamic_sizes_are_symbols(self):
        text = dump(trace(lambda x: x + 1, [4, 3], dynamic=True))
        self.assertExpectedInline(  # torch numbers symbols as it likes
            re.sub(r"s\d+", "s", text),
            """\
x_1: [s, s]
add: [s, s] = add(x_1, 1)
return add""",
        )

    def test_dtype_and_device_reach_the_values(self):
        graph = trace(lambda x: x + 1, [4], dtype=torch.bfloat16, device="cuda")
        value = next(iter(graph.nodes)).meta["val"]
        self.assertEqual((value.dtype, value.device.type), (torch.bfloat16, "cuda"))

    def test_group_is_gone_after_the_trace(self):
        trace(gathered_weight, [16, 16], [2, 16])
        self.assertFalse(dist.is_initialized())

    def test_group_of_the_caller_is_used_and_kept(self):
        with fake_group(world_size=4, rank=3):
            trace(lambda x: x * dist.get_world_size(), [2])
            self.assertEqual((dist.get_world_size(), dist.get_rank()), (4, 3))

    def test_second_group_is_refused(self):
        with fake_group(), pytest.raises(RuntimeError, match="destroy_process_group"):
            fake_group().__enter__()


def test_leaving_flushes_and_keeps_the_status():
    program = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from inductor_passes.testing import leave_process
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
print("said", end="")
leave_process(3)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (3, "said")


if __name__ == "__main__":
    run_tests()
