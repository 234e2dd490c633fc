"""torchtitan's Llama-3 in one graph on two real ranks, with eager's losses."""

from importlib import util
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("torchtitan_worker.py")
# Its kernels are imported with its models.
MISSING = [name for name in ("torchtitan", "triton", "spmd_types") if util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_its_llama_is_one_graph(torchrun):
    torchrun(WORKER, ranks=2, timeout=600)
