"""Graphs in parts through Inductor on two real ranks: both cut alike, and eager's numbers."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("split_worker.py")


@pytest.mark.slow
def test_in_parts_is_eager_on_every_rank(on_ranks):
    on_ranks(WORKER, ranks=2)


@pytest.mark.slow
@pytest.mark.sweep  # rules of routing have tests of their own, and the worker above runs in parts
def test_experts_that_keep_all_tokens_are_eager_on_every_rank(on_ranks):
    on_ranks(WORKER.with_name("moe_worker.py"), ranks=4)
