"""verify() where each rank is a process: right steps pass on all of them, wrong ones are named."""

from pathlib import Path

import pytest


@pytest.mark.main
@pytest.mark.slow
def test_every_rank_sees_the_same(on_ranks):
    on_ranks(Path(__file__).with_name("ranks_worker.py"), ranks=2, timeout=300)
