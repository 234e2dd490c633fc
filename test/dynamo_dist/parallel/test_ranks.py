"""The scenarios of ``ranks_worker.py`` and of ``localize_worker.py`` on four real ranks."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.slow
def test_losses_and_weights_are_those_of_torchs_wrappers(on_ranks):
    on_ranks(WORKER, ranks=4)


@pytest.mark.slow
def test_localized_trains_saves_and_loads_as_with_dtensors(on_ranks):
    on_ranks(WORKER.with_name("localize_worker.py"), ranks=4)
