"""Random numbers on four real gloo ranks: what is replicated is drawn equally everywhere."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("draws_worker.py")


@pytest.mark.slow
def test_replicas_draw_alike(on_ranks):
    on_ranks(WORKER, ranks=4, timeout=420)
