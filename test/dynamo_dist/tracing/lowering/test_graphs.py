"""What c10d calls become in the AOT graph: which launch, and where its wait stands."""

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

SHOWN = ("_c10d_functional", "dynamo_dist", "aten")


def launches(function, *args):
    """One line for each launch, wait, matrix product and copy of the compiled graphs, in order."""
    lines = []

    def record(graph, inputs):
        for node in graph.graph.nodes:
            space = getattr(node.target, "namespace", None)
            name = getattr(node.target, "_opname", "")
            if space in SHOWN and (space != "aten" or name in ("mm", "copy_")):
                constants = [str(a) for a in node.args if isinstance(a, (str, int))]
                lines.append(" ".join([name, *constants]))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=record, inference_compiler=record, keep_inference_input_mutations=True
    )
    torch.compile(function, backend=backend, fullgraph=True)(*args)
    return "\n".join(lines)


class TestGraphs(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _on_a_mesh(self, mesh, enabled):
        self.mesh = mesh

    def test_the_wait_stands_where_the_user_waits(self):
        def program(x, w):
            work = dist.all_reduce(x, async_op=True)
            hidden = w @ w
            work.wait()
            return x @ hidden

        self.assertExpectedInline(
            launches(program, torch.ones(4, 4), torch.ones(4, 4)),
            """\
all_reduce sum 0
mm
wait_tensor
mm
copy_""",
        )

    def test_unwaited_work_ends_with_the_graph_and_warns(self):
        def program(x, w):
            dist.all_reduce(x, async_op=True)
            return w @ w

        with self.assertLogs("dynamo_dist.tracing.work", "WARNING") as logs:
            text = launches(program, torch.ones(4, 4), torch.ones(4, 4))
        self.assertExpectedInline(
            text,
            """\
all_reduce sum 0
mm
wait_tensor
copy_""",
        )
        self.assertIn("test_graphs.py", logs.output[0])
        self.assertIn("never waited for", logs.output[0])

    def test_equal_sends_and_a_barrier_are_kept_in_program_order(self):
        def program(x):
            for work in [dist.isend(x, 1), dist.isend(x, 1)]:
                work.wait()
            dist.barrier()
            got = torch.empty_like(x)
            dist.recv(got, 7)
            return got

        self.assertExpectedInline(
            launches(program, torch.ones(4, 4)),
            """\
isend 1 0 0 1
isend 1 0 0 2
wait_tensor 3
wait_tensor 4
barrier 0 5
wait_tensor 6
irecv 7 0 0 7
wait_tensor""",
        )

    def test_a_manager_makes_one_launch(self):
        def program(x, y):
            with dist._coalescing_manager(async_ops=True) as manager:
                dist.all_reduce(x)
                dist.all_reduce(y)
            hidden = x.new_ones(4, 4) @ x.new_ones(4, 4)
            manager.wait()
            return x + y + hidden

        self.assertExpectedInline(
            launches(program, torch.ones(4, 4), torch.ones(4, 4)),
            """\
all_reduce_coalesced sum 0
mm
wait_tensor
wait_tensor
copy_
copy_""",
        )

    def test_uneven_lists_are_one_padded_launch(self):
        def program(x):
            pieces = [torch.zeros(rank % 2 + 1, 4) for rank in range(8)]
            dist.all_gather(pieces, x)
            return pieces

        self.assertExpectedInline(
            launches(program, torch.ones(1, 4)),
            """\
all_gather_into_tensor 8 0
wait_tensor""",
        )
