"""The command on a script of a user's, in a process of its own."""

import json
import subprocess
import sys

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

dist.init_process_group("gloo")

class Sharded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shard = torch.nn.Parameter(torch.ones(64 // dist.get_world_size(), 32))

    def forward(self, x):
        whole = funcol.all_gather_tensor_autograd(self.shard, 0, dist.group.WORLD)
        return torch.relu(x @ whole.t())

torch.compile(Sharded())(torch.ones(6, 10, 32)).sum().backward()
print("from the script")
"""


@pytest.fixture
def formula(tmp_path):
    script = tmp_path / "step.py"
    script.write_text(SCRIPT)

    def run(*options):
        return subprocess.run(
            [sys.executable, "-m", "inductor_passes", "costs", "formula", *options, str(script)],
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


@pytest.mark.slow
def test_a_script(formula):
    done = formula("--json", "--ranks", "16,1024")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["graphs"] == 2
    sources = {symbol["source"] for symbol in found["symbols"].values()}
    assert sources == {"ranks of the group 0, 1, ..., 7", "L['x'].size()[0]", "L['x'].size()[1]"}
    kinds = {term["what"] for term in found["terms"] if term["where"] != "compute"}
    assert kinds == {"all_gather", "reduce_scatter"}
    few, many = found["predicted"]
    assert few["compute_us"] == many["compute_us"]
    assert few["at_most_us"] < many["at_most_us"]
    text = formula("--ranks", "16")
    assert "n = 16: " in text.stdout
    assert "link of ranks 0, 1, ..., 7" in text.stdout
    wrong = formula("--set", "batch=3")
    assert wrong.returncode == 2
    assert wrong.stderr.splitlines()[-1].startswith("error: The formula has no symbol 'batch'.")
