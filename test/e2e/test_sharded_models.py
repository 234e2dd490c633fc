"""Models of transformers under tensor parallelism and FSDP2, or ``data_parallel``, on four gloo ranks: one device's gradients."""

import json
from pathlib import Path

import preloaded
import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("sharded_models_worker.py")
CASES = ["llama:fully_shard", "qwen3_moe:fully_shard", "gemma3:fully_shard", "gemma3:data_parallel"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("sharded")
    variables = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    arguments = [str(folder), *CASES]
    preloaded.run_ranks(WORKER, 4, arguments, variables, folder=folder, timeout_s=480)
    files = [folder / f"{rank}.json" for rank in range(4)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_device(models, case):
    assert [rank.get(case) for rank in models] == ["ok"] * 4
