"""The scenarios of ``ranks_worker.py`` on four real ranks."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_losses_and_weights_are_those_of_torchs_wrappers(torchrun):
    torchrun(WORKER, ranks=4)
