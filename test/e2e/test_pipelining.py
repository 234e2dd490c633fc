"""``torch.distributed.pipelining`` with compiled stages: whole graphs, and what eager stages
train, on 2 and 4 ranks.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("pipelining_worker.py")
SCHEDULES = [
    "ScheduleGPipe",
    "Schedule1F1B",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
]
CASES = {
    2: ["Schedule1F1B:inductor", *SCHEDULES],
    4: [*SCHEDULES, "Schedule1F1B:tp", "ScheduleInterleavedZeroBubble:tp"],
}


@pytest.fixture(scope="module", params=CASES)
def trained(request, cases_on_ranks, tmp_path_factory):
    ranks = request.param
    return ranks, cases_on_ranks(
        WORKER, ranks, CASES[ranks], tmp_path_factory.mktemp("pipeline"), timeout=300
    )


def test_stages_train_as_in_eager_mode(trained):
    ranks, found = trained
    said = {case: [rank[case] for rank in found] for case in CASES[ranks]}
    assert said == {case: ["ok"] * ranks for case in CASES[ranks]}
