"""Text, page, JSON and trace of graphs, made by this package alone."""

import dataclasses
import io
import json
import os
import subprocess
import sys

import pytest
from expecttest import TestCase
from rich.console import Console

from inductor_passes.report import report
from inductor_passes.report.figures import GraphsReport
from inductor_passes.report.render_html import page
from inductor_passes.report.render_text import print_graphs
from inductor_passes.report.report import write_graphs

ALONE = """
import sys, torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
import inductor_passes
from inductor_passes.testing import fake_group

def step(x):
    return funcol.all_reduce(x @ x, "sum", dist.group.WORLD) @ x

with fake_group(4), torch.no_grad():
    torch.compile(step, options=inductor_passes.options(report=sys.argv[1]))(torch.ones(8, 8))
assert not [name for name in sys.modules if name.startswith("dynamo_dist.diagnostics")]
"""


@pytest.fixture
def made(graph):
    return GraphsReport(1, 8, "2.13.0", "0.1.0", "h100x8", (graph(),))


def test_text(made):
    out = io.StringIO()
    print_graphs(made, Console(file=out, width=100, color_system=None))
    TestCase().assertExpectedInline(
        "\n".join(line.rstrip() for line in out.getvalue().splitlines()),
        """\
inductor_passes 0.1.0: rank 1 of 8, torch 2.13.0
  graphs        1
  launches      1 (1 all_gather)
  exposed       80 us -> 20 us, -75 % (simulated on h100x8)
  time          230 us -> 170 us, -26 % (simulated on h100x8)
  peak memory   3 MiB -> 4 MiB, +33 % (simulated on h100x8)

forward graph: 5 nodes, 1 collective; order kept in the generated code
  share_launches (bitwise): 1 launches removed
  nothing to do: schedule
  skipped, triton is missing: fuse
  busiest group's link: 80 us
  warning: fuse failed and was left out
  all_gather 1 MiB on tp, predicted 80 us: 80 us -> 20 us exposed
    model.py:12 w = self.weight.full_tensor()""",
    )


def test_the_page_has_the_graphs_and_says_nothing_of_breaks(made):
    text = page(made)
    assert "<h1>inductor_passes report</h1>" in text and "rank 1 of 8" in text
    assert "w = self.weight.full_tensor()" in text
    assert "Graph breaks" not in text and "dynamo_dist" not in text


def test_files(made, tmp_path):
    written = write_graphs(dataclasses.replace(made, world_size=1), tmp_path)
    assert [path.name for path in written] == ["report.html", "report.json", "trace.json"]
    assert len(json.loads(written[1].read_text())["graphs"]) == 1


def test_a_writer_that_raises_costs_a_warning(tmp_path, caplog):
    def reporter(folder):
        def refresh():
            raise KeyError(folder)

        return refresh

    before = report.use(reporter)
    try:
        report.write(str(tmp_path))
    finally:
        report.use(before)
    assert "could not be written (KeyError" in caplog.text


@pytest.mark.slow
def test_in_a_process_that_has_not_heard_of_dynamo_dist(tmp_path):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", ALONE, str(tmp_path / "out")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").glob("report*.json")
    (found,) = json.loads(file.read_text())["graphs"]
    assert [c["kind"] for c in found["collectives"]] == ["all_reduce"]
    assert "Graph breaks" not in file.with_suffix(".html").read_text()
