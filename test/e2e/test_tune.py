"""``tune`` on two real ranks: one decision, eager's numbers, nothing left in the code, a slow rank named."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("tune_worker.py")


@pytest.mark.slow
def test_ranks_are_tuned_together_and_stay_right(on_ranks):
    on_ranks(WORKER, ranks=2)
