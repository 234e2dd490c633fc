"""The programs of ``gloo_programs`` on four real ranks: on each, compiled gives what eager
gives.
"""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("gloo_worker.py")
SIZE = 4


@pytest.mark.main
@pytest.mark.slow
def test_every_rank_equals_eager(on_ranks, tmp_path):
    on_ranks(WORKER, SIZE, tmp_path)
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(SIZE)]
    assert len(results[0]) > 20
    for rank, result in enumerate(results):
        assert {name: what for name, what in result.items() if what} == {}, f"rank {rank}"
