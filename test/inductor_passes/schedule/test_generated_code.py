"""Buckets, read from the code that Inductor generated for them."""

import pytest
import torch
from programs import EVERY_KIND, RANKS, CoalescingCost, MergeAll, every_kind
from torch._inductor.utils import fresh_cache, run_and_get_code

import inductor_passes as ip
from inductor_passes.inductor.generated_code import order_kept, read_order
from inductor_passes.report import recorder
from inductor_passes.testing import FixedCost, fake_group

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("cost", [FixedCost(), CoalescingCost()], ids=["packed", "coalesced"])
def test_buckets_survive_lowering(cost):
    class Merge(MergeAll):
        name = "merge_all"

        @classmethod
        def build(cls, context):
            return cls(cost)

    ip.register(Merge)
    torch._dynamo.reset()
    options = ip.options(passes=["merge_all"])
    try:
        with (
            fake_group(RANKS),
            fresh_cache(),
            torch.no_grad(),
            recorder.records_of_block() as records,
        ):
            inputs = [torch.randn(*shape) for shape in EVERY_KIND]
            _, (code,) = run_and_get_code(
                torch.compile(lambda *args: every_kind(*args), options=options), *inputs
            )
    finally:
        ip.unregister(Merge)
        torch._dynamo.reset()
    (record,) = records
    assert order_kept(record.order, code) is True, (record.order, read_order(code))
    assert sum(event.startswith("launch") for event in read_order(code)) == 4
    coalesced = isinstance(cost, CoalescingCost)
    assert ("all_gather_into_tensor_coalesced" in code) is coalesced
    # What is waited for may be overwritten, and no earlier: the reductions work in place.
    assert "all_reduce_.default" in code
