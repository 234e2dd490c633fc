"""Real programs on real gloo ranks, forward and backward: one graph, and on each rank as in
eager.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("program_worker.py")
HAND_WRITTEN = [
    "megatron_mlp:aot_eager",
    "ring_exchange:aot_eager",
    "pipeline:aot_eager",
    "ulysses_attention:aot_eager",
    "vocabulary_cross_entropy:aot_eager",
    "megatron_mlp:dynamo_dist",
    "ring_exchange:dynamo_dist",
]
GRAPHS = ["megatron_mlp:graphs", "ring_exchange:graphs"]
MODELS = ["llama:aot_eager", "qwen3:aot_eager", "mixtral:aot_eager"]


@pytest.fixture(scope="module")
def hand_written(cases_on_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hand_written")
    return cases_on_ranks(WORKER, 3, HAND_WRITTEN + GRAPHS, folder, timeout=240)


@pytest.fixture(scope="module")
def models(cases_on_ranks, tmp_path_factory):
    pytest.importorskip("transformers")
    return cases_on_ranks(WORKER, 2, MODELS, tmp_path_factory.mktemp("models"), timeout=240)


@pytest.mark.parametrize("case", HAND_WRITTEN)
def test_hand_written(hand_written, case):
    assert [rank[case] for rank in hand_written] == ["ok"] * 3


def test_waits_stand_where_the_program_waits(hand_written):
    for rank in hand_written:
        megatron, ring = (rank[case] for case in GRAPHS)
        assert isinstance(megatron, list) and isinstance(ring, list), (megatron, ring)
        in_layer = ["mm", "mm", "all_reduce", "wait_tensor"]
        assert megatron[: megatron.index("end")] == 2 * in_layer, megatron
        backward = megatron[megatron.index("end") + 1 :]
        # The weight's gradient is computed between the launch and the wait.
        assert backward.count("all_reduce") == 2
        for at in (i for i, word in enumerate(backward) if word == "all_reduce"):
            assert backward[at : at + 3] == ["all_reduce", "mm", "wait_tensor"], backward
        in_step = ["isend", "irecv", "mm", "wait_tensor", "wait_tensor"]
        assert ring[: ring.index("end")] == [*in_step, *in_step, "mm"], ring
        backward = ring[ring.index("end") + 1 : -1]
        assert backward == ["mm", *in_step, "mm", *in_step, "mm", "mm"], backward


@pytest.mark.parametrize("case", MODELS)
def test_tp_plan(models, case):
    assert [rank[case] for rank in models] == ["ok"] * 2
