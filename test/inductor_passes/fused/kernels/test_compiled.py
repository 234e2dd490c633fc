"""Compiled graphs where fused kernels can run: failed waits are raised, operators are there for
cached code.
"""

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")

import inductor_passes as ip
from inductor_passes.errors import KernelError
from inductor_passes.fused import feature
from inductor_passes.fused.kernels import availability, register_operators
from inductor_passes.fused.kernels import workspace as spaces
from inductor_passes.inductor.session import compile_with_passes, graph_passes_only


@pytest.fixture
def available(monkeypatch):
    monkeypatch.setattr(availability, "why_not_here", lambda: "")
    yield monkeypatch
    spaces.release()


def test_a_wait_that_gave_up_is_raised_by_the_next_call(available):
    torch._dynamo.reset()
    with graph_passes_only():
        double = torch.compile(lambda x: x * 2, backend=compile_with_passes)
        assert double(torch.ones(())) == 2
        space = spaces.virtual_workspace("all_reduce_add_norm", 2, 64, "cpu")
        spaces.install_workspace("0", space)
        assert double(torch.ones(())) == 2
        space.reports[1, :5] = torch.tensor([1, 0, 7, 5, 4])  # as a kernel in a CUDA graph would
        with pytest.raises(
            KernelError, match="all_reduce_add_norm on rank 1 gave up on chunk 7 of rank 0"
        ):
            double(torch.ones(()))


def test_attaching_registers_what_code_from_a_cache_may_call(available):
    called = []
    available.setattr(feature, "register_operators", lambda: called.append(True))
    ip.options()
    available.setattr(availability, "why_not_here", lambda: "triton is not installed")
    ip.options()
    assert called == [True]


def test_every_operator_of_the_list_is_registered():
    register_operators()
    registered = {
        name.removeprefix("inductor_passes::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("inductor_passes::")
    }
    assert {row.name for row in feature.KERNELS} == registered
