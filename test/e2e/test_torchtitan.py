"""torchtitan on two real ranks: its Llama-3 in one graph, and its own trainer, each with eager's
losses.
"""

from importlib import util
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
# Its kernels are imported with its models.
MODELS = ("torchtitan", "triton", "spmd_types")
TRAINER = (*MODELS, "tyro", "torchdata", "datasets", "tokenizers", "tensorboard")
# Two graphs or three: of two blocks, which share one where their guards are alike, and of the loss.
CASES = [f"{case},ways=eager+ours,short" for case in ("llama3,tp=2", "deepseek_v3,fsdp=2,ep=2")]


def needs(packages):
    missing = [name for name in packages if util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


@needs(MODELS)
def test_its_llama_is_one_graph(torchrun):
    torchrun(HERE / "torchtitan_worker.py", ranks=2, timeout=600)


@needs(TRAINER)
def test_its_trainer_trains_as_in_eager_mode(cases_on_ranks, tmp_path):
    worker = HERE / "torchtitan_trainer_worker.py"
    ranks = cases_on_ranks(worker, 2, CASES, tmp_path, timeout=400)
    for case in CASES:
        for found in (rank[case] for rank in ranks):
            assert isinstance(found, dict) and "values" in found["ours"], found
            eager, ours = (torch.tensor(found[way]["values"]) for way in ("eager", "ours"))
            torch.testing.assert_close(ours, eager, rtol=1e-5, atol=0)
            assert not found["ours"]["breaks"]
            assert 2 <= found["ours"]["graphs"] <= 3
            assert found["ours"]["launches"].keys() == {"forward", "backward"}
