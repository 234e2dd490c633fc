"""Second channels on two real ranks: made on both or on neither, used alike, and eager's numbers."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("channels_worker.py")


@pytest.mark.slow
def test_launches_on_a_clone_are_eager_on_every_rank(on_ranks):
    on_ranks(WORKER, ranks=2)
