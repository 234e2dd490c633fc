"""Python on the pages of docs/ runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
MYLIB = """
import torch

@torch.library.custom_op("mylib::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by
"""
STEP = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
batches = [torch.randn(4, 8) for _ in range(3)]
"""
STEPPED = """
from torch._dynamo.utils import counters
assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
assert scheduler.last_epoch == 3 and not loss.requires_grad
"""
# What a page does not say: names of a program that it supposes.
SUPPOSED = {
    "own-pass": ("", "assert 'count_sums' in inductor_passes.registered_passes()"),
    "sharding-rule": (MYLIB, ""),
    "tracker": ("", ""),
    "training-step": (STEP, STEPPED),
    "own-package": (
        "import inductor_passes",
        "inductor_passes.register_extension(Deepen()); inductor_passes.options(depth=3)",
    ),
}


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.mark.slow
def test_how_to_snippets_run():
    programs = {}
    for name, (before, after) in SUPPOSED.items():
        # The last block of the page on rules is a call on a model of the reader's.
        blocks = [each for each in snippets(f"how-to/{name}.md") if "(model, inputs)" not in each]
        programs[name] = "\n".join([before, *blocks, after])
    # In one process, since importing torch takes longer than all of them.
    program = f"for name, text in {programs!r}.items(): exec(compile(text, name, 'exec'), {{}})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.sweep
def test_tutorial_finds_a_break_and_mends_it(tmp_path, torchrun):
    broken, mended = snippets("tutorials/first-graph-break.md")
    head = broken.partition("@torch.compile")[0]
    for program, breaks in ((broken, 1), (f"{head}{mended}\ndist.destroy_process_group()\n", 0)):
        (tmp_path / "program.py").write_text(program)
        done = torchrun("-m", 2, "dynamo_dist", "explain", "program.py", timeout=300, cwd=tmp_path)
        assert f"graph breaks  {breaks}" in done.stdout
        assert done.stdout.count("tensor([1., 1., 1.])") == 2
