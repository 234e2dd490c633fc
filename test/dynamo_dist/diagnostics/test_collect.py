"""What is seen of programs that really break, and that nothing stays behind."""

import logging
import threading

import pytest
import torch
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._dynamo.utils as dynamo_utils
import torch.distributed as dist

from dynamo_dist.diagnostics import collect, explain
from dynamo_dist.diagnostics.breaks import CATALOG, Cause
from dynamo_dist.testing import fake_mesh
from inductor_passes.report import recorder


def hooks():
    return (
        symbolic_convert.InstructionTranslatorBase.__dict__["log_graph_break"],
        dynamo_utils.log_compilation_event,
    )


def run(fn, *args, **options):
    return torch.compile(fn, backend="eager", **options)(*args)


def line_of(function, offset):
    code = function.__code__
    return f"{code.co_filename}:{code.co_firstlineno + offset}: "


def branches(x):
    if x.sum() > 0:
        return x + 1
    return x - 1


def prints_in_a_loop(x):
    for _ in range(2):
        x = x + 1
        print("in a loop")
    return x


def inner_prints(x):
    x = x + 1
    print("inner")
    return x * 2


def outer(x):
    return inner_prints(x) + 1


def adds(x, n):
    return x + n


def test_a_break_is_told_with_line_why_and_fix():
    with collect() as collector:
        run(branches, torch.ones(3))
    (item,) = collector.breaks
    assert item.kind == "Data-dependent branching"
    assert item.user_line == line_of(branches, 1) + "if x.sum() > 0:"
    assert item.reason.startswith("Detected data-dependent branching")
    assert item.cause == "data_dependent_branch"
    assert "torch.where" in item.fix
    assert any("torch.cond" in hint for hint in item.hints)
    assert (item.effect, item.count) == ("split", 1)


def test_line_of_an_inlined_function_is_logged_once(capsys):
    with collect() as collector:
        run(outer, torch.ones(3))
    (item,) = collector.breaks
    assert item.user_line == line_of(inner_prints, 2) + 'print("inner")'
    # Dynamo breaks in the outer function at the call, then in the inner one.
    assert item.count == 2
    assert item.cause == "print_inside"


def test_a_function_that_falls_back_whole_says_so(capsys):
    with collect() as collector:
        run(prints_in_a_loop, torch.ones(3))
    (item,) = collector.breaks
    assert (item.effect, item.count) == ("eager", 1)
    assert item.user_line == line_of(prints_in_a_loop, 3) + 'print("in a loop")'


def test_a_failed_compile_is_told_and_still_raises():
    with collect() as collector, pytest.raises(Exception, match="Data-dependent"):
        run(branches, torch.ones(3), fullgraph=True)
    (item,) = collector.breaks
    assert (item.effect, item.count, item.cause) == ("error", 1, "data_dependent_branch")
    assert item.user_line == line_of(branches, 1) + "if x.sum() > 0:"


def test_a_failing_backend_is_told():
    def broken(gm, inputs):
        raise ZeroDivisionError("of the backend")

    with collect() as collector, pytest.raises(Exception, match="of the backend"):
        torch.compile(adds, backend=broken)(torch.ones(3), 1)
    (item,) = collector.breaks
    assert (item.kind, item.effect, item.cause) == ("BackendCompilerFailed", "error", "")
    assert "of the backend" in item.explanation


def test_collectives_that_upstream_cannot_trace():
    def objects(x):
        gathered = [None] * 8
        dist.all_gather_object(gathered, 1)
        return x + 1

    def barrier(x):
        dist.barrier()
        return x + 1

    def new_group(x):
        return x + dist.new_group([0, 1]).size()

    found = []
    with fake_mesh():
        for fn in (objects, barrier, new_group):
            torch.compiler.reset()
            with collect() as collector:
                try:
                    run(fn, torch.ones(3), fullgraph=True)
                except Exception:
                    pass
            (item,) = collector.breaks
            found.append((item.cause, item.user_line.rpartition(": ")[2]))
    assert found == [
        ("object_collective", "dist.all_gather_object(gathered, 1)"),
        ("barrier", "dist.barrier()"),
        ("group_created_inside", "return x + dist.new_group([0, 1]).size()"),
    ]


def test_recompiles_name_the_guard():
    with collect() as collector, torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        for n in range(3):
            run(adds, torch.ones(3), n)
    found = [(item.function, item.guard, item.count) for item in collector.recompiles]
    assert found == [("adds", "n == 0", 1), ("adds", "n == 1", 1)]
    assert {item.user_line for item in collector.recompiles} == {line_of(adds, 0).rstrip(": ")}


def test_giving_up_on_recompiling_is_a_break():
    patch = torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=1)
    with collect() as collector, patch:
        for n in range(2):
            run(adds, torch.ones(3), n)
    (item,) = collector.breaks
    assert (item.cause, item.effect) == ("recompile_limit", "eager")
    assert item.user_line.startswith(__file__)


def test_a_clean_program_has_nothing_to_tell():
    with collect() as collector:
        run(adds, torch.ones(3), 1, fullgraph=True)
    assert (collector.graphs, collector.breaks, collector.recompiles) == ([], [], [])


def test_nothing_stays_behind():
    before = hooks()
    with collect(), collect() as inner:
        assert hooks() != before
    assert hooks() == before
    with pytest.raises(ZeroDivisionError), collect():
        raise ZeroDivisionError
    assert hooks() == before
    run(branches, torch.ones(3))
    assert inner.breaks == []


def test_an_outer_collector_goes_on_when_an_inner_one_ends():
    with collect() as out:
        with collect() as inner:
            run(branches, torch.ones(3))
        run(outer, torch.ones(3))
    assert len(inner.breaks) == 1
    assert len(out.breaks) == 2


def test_what_torch_logs_is_the_same(caplog):
    def logged():
        torch.compiler.reset()
        caplog.clear()
        with caplog.at_level(logging.DEBUG, "torch._dynamo.symbolic_convert.__graph_breaks"):
            run(branches, torch.ones(3))
        return [
            (r.name, r.levelname, r.funcName, r.getMessage().splitlines()[:2])
            for r in caplog.records
        ]

    plain = logged()
    with collect():
        collected = logged()
    assert collected == plain
    levels = [logging.getLogger(name).level for name in ("torch", "torch._dynamo")]
    with collect():
        assert [logging.getLogger(n).level for n in ("torch", "torch._dynamo")] == levels


def test_other_threads_are_seen():
    with collect() as collector:
        thread = threading.Thread(target=run, args=(branches, torch.ones(3)))
        thread.start()
        thread.join()
    assert len(collector.breaks) == 1


def test_a_later_graph_record_replaces_the_earlier(graph):
    with collect() as collector:
        recorder.publish(graph(graph_id="a", order_kept=None))
        recorder.publish(graph(graph_id="b"))
        recorder.publish(graph(graph_id="a", order_kept=False))
    recorder.publish(graph(graph_id="c"))
    assert [(g.graph_id, g.order_kept) for g in collector.graphs] == [("a", False), ("b", True)]


def test_causes_of_ones_own():
    mine = Cause(name="mine", why="Because.", fix="f()", kind="Data-dependent")
    with collect(catalog=(mine, *CATALOG)) as collector:
        run(branches, torch.ones(3))
    (item,) = collector.breaks
    assert (item.cause, item.explanation, item.fix) == ("mine", "Because.", "f()")


def test_a_report_knows_its_process(graph):
    with collect() as collector, fake_mesh(2, 4, rank=5):
        recorder.publish(graph())
        report = collector.report()
    assert (report.rank, report.world_size, report.topology) == (5, 8, "h100x8")
    assert report.torch_version == torch.__version__
    assert collector.report().world_size == 1


def test_explain_compiles_anew_and_reports():
    run(branches, torch.ones(3))
    report = explain(branches, backend="eager")(torch.ones(3))
    assert [item.cause for item in report.breaks] == ["data_dependent_branch"]
