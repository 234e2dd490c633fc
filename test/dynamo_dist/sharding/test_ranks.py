"""Losses, convolutions and the rest on four real gloo ranks, where a collective that is lost
shows.
"""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.main
@pytest.mark.slow
def test_forward_and_backward_equal_one_device(on_ranks):
    on_ranks(WORKER, ranks=4, timeout=420)
