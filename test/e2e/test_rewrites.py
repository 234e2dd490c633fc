"""Rewritten graphs through Inductor on two real ranks: the numbers of eager."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("rewrites_worker.py")


@pytest.mark.slow
def test_rewritten_is_eager_on_every_rank(on_ranks):
    on_ranks(WORKER, ranks=2)
