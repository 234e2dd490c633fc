"""``options={"costs": "measured"}``: a job that tunes itself while it runs, and the next one, which starts tuned."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("by_itself_worker.py")


@pytest.mark.slow
def test_a_job_tunes_itself_and_the_next_starts_tuned(on_ranks):
    on_ranks(WORKER, 2, "first")
    on_ranks(WORKER, 2, "second")
