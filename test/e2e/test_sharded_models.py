"""Models of transformers under tensor parallelism and FSDP2, on four gloo ranks: one device's
gradients.
"""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("sharded_models_worker.py")
CASES = [
    "qwen3_moe:1:graphs",
    *(
        pytest.param(f"{case}:2:code", marks=pytest.mark.sweep)
        for case in (
            "qwen3_moe",
            "llama",
            "gemma3",
        )
    ),
]


@pytest.fixture(scope="module")
def models(asked, cases_on_ranks, tmp_path_factory):
    pytest.importorskip("transformers")
    cases = [each["case"] for each in asked]
    return cases_on_ranks(WORKER, 4, cases, tmp_path_factory.mktemp("sharded"), timeout=480)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(models, case):
    assert [rank[case] for rank in models] == ["ok"] * 4
