"""A small valid file of every format that is read, and how it is read.

A reader takes a path and gives ``(exit status, what it said)``: commands are run as a user runs
them, what no command reads is read by its function.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dynamo_dist import __main__ as dist_command
from dynamo_dist.diagnostics.records import BreakRecord, Fact, PlannedStep, PlanRecord, RunReport
from dynamo_dist.planning import file as plan_file
from inductor_passes import __main__ as passes_command
from inductor_passes import records as r
from inductor_passes.cost.topology import load_topology, topology_text
from inductor_passes.report import recorder

Outcome = tuple[int, str]


@dataclass(frozen=True)
class Example:
    """``text`` is a valid file; ``read`` reads a file of this format."""

    text: str
    read: Callable[[Path], Outcome]


def examples() -> dict[str, Example]:
    """By the name of the format."""
    h100 = topology_text("h100x8")
    return {
        "problem": Example(json.dumps(_problem()), _command(passes_command.main, "schedule")),
        "topology": Example(json.dumps(_measured(json.loads(h100))), _function(load_topology)),
        "profile": Example(json.dumps(_profile()), _import),
        "log": Example(_LOG, _import),
        "report": Example(json.dumps(_report().to_json()), _shown),
        "merged report": Example(_merged(), _shown),
        "plan": Example(_plan(), _function(lambda path: plan_file.load_plans(str(path)))),
        "record": Example(json.dumps(_graph().to_json()), _record),
    }


def _command(main: Callable[[list[str]], int], *before: str) -> Callable[[Path], Outcome]:
    def read(path: Path, *after: str) -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([*before, str(path), *after])
        out.getvalue().encode()  # what cannot be encoded cannot be printed
        return status, err.getvalue()

    return read


def _function(function: Callable[[Path], object]) -> Callable[[Path], Outcome]:
    """The function's documented errors are RuntimeErrors with what, why and fix."""

    def read(path: Path) -> Outcome:
        try:
            function(path)
        except RuntimeError as error:
            if not hasattr(error, "fix"):
                raise
            return 2, f"error: {error}\n"
        return 0, ""

    return read


def _import(path: Path) -> Outcome:
    after = ("--topology", "h100x8", "-o", str(path.with_name("made.json")))
    return _command(passes_command.main, "costs", "import")(path, *after)


def _shown(path: Path) -> Outcome:
    made = ("--html", str(path.with_name("page.html")), "--trace", str(path.with_name("t.json")))
    for form in ((), ("--json",)):
        status, said = _command(dist_command.main, "report", *form)(path, *(() if form else made))
    with contextlib.redirect_stdout(io.StringIO()):
        status, said = _command(dist_command.main, "report")(path, *made)
    return status, "".join(line for line in said.splitlines(True) if not line.startswith("wrote "))


def _record(path: Path) -> Outcome:
    """A record that cannot be read is as good as none."""
    folder = path.with_name("inductor_passes") / "records"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "key.json").write_bytes(path.read_bytes())
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(path.parent)
    try:
        recorder.load_record("key")
    finally:
        del os.environ["TORCHINDUCTOR_CACHE_DIR"]
        if before is not None:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before
    return 0, ""


def _problem() -> dict[str, object]:
    def launch(name: str, *deps: int) -> dict[str, object]:
        of_launch = {"group": "a", "op": "all_gather", "dtype": "f32", "payload": 1 << 20}
        node = {"name": name, "kind": "launch", "deps": deps, "us": 0, "bytes": 1 << 20}
        return {**node, "alias": None, "reduce": None, **of_launch}

    def node(name: str, kind: str, us: float, *deps: int, **more: object) -> dict[str, object]:
        return {"name": name, "kind": kind, "deps": deps, "us": us, "bytes": 64, **more}

    return {
        "name": "example",
        "nodes": [
            node("x", "input", 0),
            launch("gather", 0),
            node("wait", "wait", 0, 1, launch=1, alias=1),
            node("mm", "compute", 50.0, 0, 2),
            launch("gather_1", 0),
            node("wait_1", "wait", 0, 4, launch=4, alias=4),
            node("mm_1", "compute", 70.0, 3, 5),
            node("output", "output", 0, 6),
        ],
        "links": {"a": {"all_gather": [[0.5, 20.0], [1.0, 30.0], [64.0, 900.0]]}},
        "copy_bytes_per_us": 1e6,
        "group_size": {"a": 8},
    }


def _measured(topology: dict[str, dict[str, object]]) -> dict[str, dict[str, object]]:
    shape = {"kind": "all_gather", "ranks": 8, "nodes": 1}
    topology["links"]["measured"] = [{**shape, "source": "a test", "points": [[8, 5], [16, 7.5]]}]
    topology["device"]["measured_products"] = [
        {"dtype": "bfloat16", "source": "a test", "points": [[1, 64, 64, 64, 3.5]]}
    ]
    return topology


def _profile() -> dict[str, object]:
    def event(cat: str, name: str, **args: object) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "ts": 0, "dur": 31.5, "args": args}

    metadata = {"Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 1024}
    group = {"Out msg nelems": 2048, "Group size": 2, "Process Group Ranks": "[0, 8]"}
    split = {"In split size": "[]", "Out split size": "[]"}
    shapes = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["c10::BFloat16"] * 2}
    events = [
        event("kernel", "nccl", **metadata, **group, **split),
        event("cpu_op", "aten::mm", **{"External id": 3}, **shapes),
        event("kernel", "gemm", **{"External id": 3}),
        event(
            "user_annotation", "gloo:all_gather", **{"Input Dims": [[64]], "Input type": ["float"]}
        ),
    ]
    info = {"rank": 0, "world_size": 16, "pg_config": [{"pg_name": "0", "ranks": [0, 8]}]}
    return {"traceEvents": events, "distributedInfo": info}


_LOG = """\
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid  425 on host-0 device  0 [0xd6] NVIDIA H100
#  Rank  1 Group  0 Pid  426 on host-0 device  1 [0xd6] NVIDIA H100
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    105.9    9.90   17.33      0    305.7    9.92   17.37      0
     2097152        524288     float     sum      -1    145.9    9.90   17.33      0    305.7    9.92   17.37      0
"""


def _graph() -> r.GraphRecord:
    spans = (
        r.SpanRecord("compute", "mm", "compute", 0.0, 100.0),
        r.SpanRecord("tp", "gather", "all_gather", 0.0, 120.0, "data"),
        r.SpanRecord("compute", "wait", "wait", 100.0, 20.0),
    )
    line = r.TimelineRecord(spans, 120.0, 100.0, 120.0, 20.0, 4 << 20, ((0.0, 64), (100.0, 128)))
    exposed = (r.ExposedRecord("gather", 20.0, "data"),)
    schedule = r.ScheduleRecord(
        "reordered", 5, 1, 0, 140.0, 120.0, 110.0, 4 << 20, 4 << 20, 5 << 20, 0.1, exposed, ("x",)
    )
    passes = (
        r.PassRecord("schedule", "bitwise", "ran", True, {"moved": 1}, 0.002, schedule=schedule),
        r.PassRecord("fuse", "reassociating", "skipped", False, {}, 0.0, "triton is missing"),
    )
    gather = r.CollectiveRecord(
        "gather",
        "all_gather",
        "tp",
        8,
        1 << 20,
        "bfloat16",
        None,
        "a.py:3: x @ w",
        120.0,
        80.0,
        20.0,
    )
    reduce = r.CollectiveRecord(
        "reduce", "all_reduce", "tp", 8, 1 << 10, "float32", "sum", "", 9.0, 0.0, 0.0
    )
    order = ("launch all_gather tp", "kernel mm", "wait 0")
    return r.GraphRecord(
        "0/0:forward",
        "forward",
        5,
        "h100x8",
        passes,
        (gather, reduce),
        line,
        line,
        order,
        True,
        ("w",),
    )


def _report(rank: int = 0, world_size: int = 1) -> RunReport:
    step = PlannedStep("aten.mm", ("R", "S0"), ("S0", "S0"))
    return RunReport(
        rank,
        world_size,
        "2.13.0",
        "0.1.0",
        "h100x8",
        (_graph(),),
        (
            BreakRecord(
                "print", "a print", "a.py:7: print(x)", "why", "fix", hints=("take it out",)
            ),
        ),
        plans=(PlanRecord("f00", "exact", 3, 9.0, 4.0, 4.0, (step,)),),
        facts=(Fact("step time", (1.5, 2.5), "ms", "simulated on h100x8"), Fact("note", "text")),
    )


def _merged() -> str:
    from dynamo_dist.diagnostics import merge_ranks

    return json.dumps(merge_ranks([_report(0, 2), _report(1, 2)]).to_json())


def _plan() -> str:
    rows = (
        plan_file.PlanRow("aten.sin.default(*)", (("R",),), (("S0",),), (("S0",), None)),
        plan_file.PlanRow("redistribute", (("S0", "P"),), (("S0", "R"),), (("S0", "R"),)),
    )
    stored = plan_file.StoredPlan(rows, (22.0, 1.0), (3.0, 1.0), 3.5, "greedy")
    return plan_file.text_of({"abc": stored})


def folder() -> tempfile.TemporaryDirectory[str]:
    """Where mutants and what is made of them lie."""
    return tempfile.TemporaryDirectory(prefix="fuzz_files_")
