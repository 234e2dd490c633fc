"""Compiled graphs skip autograd's kernels of the operators that they call, unless somebody
else's may do more.
"""

import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch._inductor.utils import fresh_cache

from dynamo_dist.runtime.calls import BELOW_AUTOGRAD, _lower
from dynamo_dist.torch_compat import inductor_code
from inductor_passes.extension import in_work

pytestmark = pytest.mark.skipif(
    inductor_code.below_autograd is None, reason="this torch cannot call below autograd"
)


def skips_autograd():
    key = torch._C._parse_dispatch_key("AutogradFunctionality")
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)


@torch.library.custom_op("test_below_autograd::custom", mutates_args=())
def custom(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


COLLECTIVE = "torch.ops._c10d_functional.all_reduce_.default(buf0, 'sum', '0')"
OTHERS = "torch.ops.others.launch.default(buf0)"


@pytest.mark.parametrize(
    ("skips", "source"),
    [
        (True, f"aten = torch.ops.aten\n{COLLECTIVE}"),
        (True, f"{COLLECTIVE}\ntorch.ops.test_below_autograd.custom.default(buf0)"),
        (True, "torch.ops.dynamo_dist.barrier.default(buf0)"),
        (False, f"{COLLECTIVE}\n{OTHERS}"),
        (False, "torch.ops.higher_order.with_effects(token)"),
    ],
)
def test_where_all_operators_are_known(skips, source):
    with in_work(SimpleNamespace(traits={BELOW_AUTOGRAD})):
        assert _lower(skips_autograd, source)() is skips
    assert _lower(skips_autograd, source) is skips_autograd
    assert not skips_autograd()


def test_an_error_does_not_leave_autograd_off():
    def fails():
        raise RuntimeError("in the graph")

    with (
        in_work(SimpleNamespace(traits={BELOW_AUTOGRAD})),
        pytest.raises(RuntimeError, match="in the graph"),
    ):
        _lower(fails, COLLECTIVE)()
    assert not skips_autograd()


def autograd_calls(fn, *args):
    """How often ``fn`` enters the Python kernel of autograd of an operator."""
    entered = []

    def look(frame, event, arg):
        if event == "call" and frame.f_code.co_name == "autograd_impl":
            entered.append(frame)

    sys.setprofile(look)
    try:
        fn(*args)
    finally:
        sys.setprofile(None)
    return len(entered)


@pytest.mark.slow
@pytest.mark.parametrize("off", [False, True])
def test_collectives_of_forward_and_backward(mesh, off):
    """Inductor compiles no kernel here: there is nothing but collectives."""

    def fn(x):
        return funcol.all_reduce(funcol.all_reduce(x, "sum", mesh["tp"]), "sum", mesh["dp"])

    x = torch.ones(4, requires_grad=True)
    grad = torch.ones(4)
    options = {"disable": ["below_autograd"]} if off else {}
    upstream = autograd_calls(lambda: funcol.all_reduce(torch.ones(4), "sum", mesh["tp"]))
    with fresh_cache():
        for _ in ("compiled", "from a warm cache"):
            torch.compiler.reset()
            step = torch.compile(fn, backend="dynamo_dist", fullgraph=True, options=options)
            step(x).backward(grad)
            x.grad = None
            calls = autograd_calls(lambda step=step: step(x).backward(grad))
            assert torch.equal(x.grad, grad)
            assert (calls > 0) is (off and upstream > 0)
