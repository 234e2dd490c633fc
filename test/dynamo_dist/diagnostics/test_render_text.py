"""The terminal's version."""

import dataclasses
import io
from pathlib import Path

from expecttest import TestCase
from rich.console import Console

from dynamo_dist.diagnostics import Fact, RunReport, merge_ranks, render_html, render_text
from dynamo_dist.diagnostics.records import PlannedStep, PlanRecord
from inductor_passes.records import PassRecord
from inductor_passes.report import describe
from inductor_passes.report.figures import WHY_EXPOSED
from inductor_passes.schedule.solver import evaluate


def printed(report):
    out = io.StringIO()
    render_text(report, Console(file=out, width=100, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def test_a_report(report):
    TestCase().assertExpectedInline(
        printed(report()),
        """\
dynamo_dist 0.1.0: rank 1 of 8, torch 2.13.0
  graph breaks  1 (met 2 times)
  graphs        1
  launches      1 (1 all_gather)
  exposed       80 us -> 20 us, -75 % (simulated on h100x8)
  time          230 us -> 170 us, -26 % (simulated on h100x8)
  peak memory   3 MiB -> 4 MiB, +33 % (simulated on h100x8)

BREAK Data-dependent branching (splits the graph, 2 times)
  /src/model.py:30: if x.sum() > 0:
  why: The branch depends on data.
  fix:
    y = torch.where(x > 0, a, b)

recompiled 2 times: forward (model.py:7): n == 3
step, ours: 12.25 ms (measured, CPU)
loss: 5.5 -> 2.25 over 3 values (measured)
note: two ranks

forward graph: 5 nodes, 1 collective; order kept in the generated code
  share_launches (bitwise): 1 launches removed
  nothing to do: schedule
  skipped, triton is missing: fuse
  busiest group's link: 80 us
  warning: fuse failed and was left out
  all_gather 1 MiB on tp, predicted 80 us: 80 us -> 20 us exposed
    model.py:12 w = self.weight.full_tensor()""",
    )


def test_an_empty_report():
    TestCase().assertExpectedInline(
        printed(RunReport()),
        """\
dynamo_dist ?: torch ?
  graph breaks  0
  graphs        0
  launches      0
  No process of this run called torch.compile.""",
    )


def test_ranks_that_differ_come_first(report):
    one = report(rank=0, world_size=3, facts=(), recompiles=(), graphs=())
    merged = merge_ranks([one, dataclasses.replace(one, rank=2, breaks=())])
    first = printed(merged).split("dynamo_dist 0.1.0")[0]
    TestCase().assertExpectedInline(
        first,
        """\
RANKS DIFFER; ranks that launch in another order hang.
  graph breaks: Data-dependent branching at model.py:30 on rank 0
  graph breaks: none on rank 2
No report from rank 1.
  Ranks of a fake group have no process, so none. Others: start all of them in the same way, and see whether they ended early.
""",
    )


def test_ranks_that_agree(report):
    merged = merge_ranks([report(rank=0, world_size=2), report(rank=1, world_size=2)])
    assert printed(merged).startswith(
        "2 ranks agree in breaks, graphs, launches, payloads and order."
    )


def test_what_upstream_compiled_is_told_once(report, graph):
    same = graph(passes=(), after=graph().before)
    facts = (Fact("peak memory of the process", 3 << 29, "bytes", "measured"),)
    TestCase().assertExpectedInline(
        printed(report(graphs=(same,), breaks=(), recompiles=(), facts=facts)).split("forward")[0],
        """\
dynamo_dist 0.1.0: rank 1 of 8, torch 2.13.0
  graph breaks  0
  graphs        1
  launches      1 (1 all_gather)
  exposed       80 us (simulated on h100x8)
  time          230 us (simulated on h100x8)
  peak memory   3 MiB (simulated on h100x8)
  Upstream Inductor compiled these graphs. What this plugin would do: compile with backend="dynamo_dist", or explain with --backend dynamo_dist.

peak memory of the process: 1.50 GiB (measured)

""",
    )


def test_a_users_text_is_never_markup(report):
    item = dataclasses.replace(report().breaks[0], user_line="m.py:1: x[red]y[/red] = [bold]")
    assert "x[red]y[/red] = [bold]" in printed(report(breaks=(item,)))


def test_a_terminal_of_few_letters(report):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    item = dataclasses.replace(report().breaks[0], user_line="m.py:1: größe(x)")
    render_text(report(breaks=(item,)), Console(file=out, width=100, color_system=None))
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "gr??e(x)" in text
    assert text.count("?") == 2


def test_alike_collectives_decisions_and_plans_are_put_together(report, graph):
    (one,) = graph().collectives
    hidden = dataclasses.replace(one, name="other", kind="all_reduce", exposed_after_us=0.0)
    exposed = dataclasses.replace(one, cause="Shard(0) -> Replicate() on tp", why_exposed="data")
    fuse = PassRecord(
        "fuse",
        "reassociating",
        "ran",
        False,
        {},
        0.0,
        notes=(
            "declined all_gather %a (m.py:1: f): no GPU",
            "declined all_gather %b (m.py:1: f): no GPU",
        ),
    )
    made = graph(collectives=(hidden, exposed, exposed), passes=(fuse,), warnings=())
    steps = (PlannedStep("aten.mm.default", ("R", "S0"), ("S0", "R")),)
    plan = PlanRecord("f00", "exact", 3, 9.0, 4.0, 4.0, steps)
    text = printed(report(graphs=(made,), plans=(plan,), breaks=(), recompiles=(), facts=()))
    TestCase().assertExpectedInline(
        text.split("\n\n", 1)[1],
        """\
plan f00 (exact): 1 of 3 steps changed; 9 us -> 4 us, bound 4 us, modelled
  aten.mm.default: R, S0 -> S0, R

forward graph: 5 nodes, 3 collectives; order kept in the generated code
  fuse: 2 x declined all_gather (m.py:1: f): no GPU
  nothing to do: fuse
  busiest group's link: 80 us
  2 x all_gather 1 MiB on tp, predicted 80 us each: 160 us -> 40 us exposed (it starts once its input is there; nothing independent is left to compute meanwhile)
    Shard(0) -> Replicate() on tp
    model.py:12 w = self.weight.full_tensor()
  all_reduce 1 MiB on tp, predicted 80 us: 80 us exposed -> hidden
    model.py:12 w = self.weight.full_tensor()""",
    )


def test_why_a_launch_is_exposed_is_known_in_words():
    said = Path(evaluate.__file__).read_text() + Path(describe.__file__).read_text()
    assert all(f'"{reason}"' in said for reason in WHY_EXPOSED)


def test_figures_of_a_graph_are_in_text_page_and_json(report):
    made = report()
    assert "busiest group's link: 80 us" in printed(made)
    assert "busiest group&#39;s link 80 µs" in render_html(made)
    (found,) = RunReport.from_json(made.to_json()).graphs[0].figures
    assert (found.value, found.unit) == (80.0, "us")
