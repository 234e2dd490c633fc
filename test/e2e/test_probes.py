"""Second payloads on two real ranks: all launch them or none does, whoever's store fails."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("probes_worker.py")


@pytest.mark.slow
def test_ranks_launch_the_same_probes_or_none(on_ranks):
    on_ranks(WORKER, ranks=2, timeout=240)
