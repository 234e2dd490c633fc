"""accelerate's training loop on two real ranks, in four ways: the numbers of its own in eager."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("accelerate_worker.py")


@pytest.mark.slow
def test_its_loop_trains_alike(torchrun):
    pytest.importorskip("accelerate", reason="the extra demo brings it")
    torchrun(WORKER, ranks=2, timeout=400)
