"""What compiled programs launch is what eager launches: members, bytes, dtype, reduce op, order,
waits.

``test/corpus/recording.py`` notes what reaches c10d, ``showing.py`` what graphs show of it. Each
check is also run on a plugin with a planted fault (``test/corpus/planted.py``), which it must find.
"""

import importlib
import json
import os
import sys
from pathlib import Path

import forked
import pytest
import torch
import torch._functorch.partitioners as partitioners
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.tracing import c10d as registry

CORPUS = Path(__file__).parents[1] / "corpus"
FAULTS = {
    "drop": "differ",
    "double": "differ",
    "other_group": "differ",
    "other_op": "differ",
    "half": "differ",
    "part": "differ",
    "unwaited": "unwaited",
    "hidden": "hidden",
}

# FSDP2 packs the parameters of a module into one launch; graphs get theirs packed by the scheduler.
PACKED = {"fully_shard_compiled_autograd", "fully_shard_submodule"}


@pytest.fixture(scope="module")
def checks():
    """The modules ``recording``, ``showing`` and ``planted`` of the corpus, and one recorder."""
    sys.path.insert(0, str(CORPUS))
    names = ("recording", "showing", "planted")
    found = {name: importlib.import_module(name) for name in names}
    recorder = found["recording"].Recorder()
    yield type("Checks", (), {**found, "recorder": recorder})
    recorder.close()
    sys.path.remove(str(CORPUS))
    for name in names:
        del sys.modules[name]


def ring(x, group):
    received = torch.empty_like(x)
    size, rank = group.size(), group.rank()
    works = [
        dist.isend(x, group_dst=(rank + 1) % size, group=group),
        dist.irecv(received, group_src=(rank - 1) % size, group=group),
    ]
    for work in works:
        work.wait()
    return received


def gathered_list(x, group):
    rows = [torch.empty(2, 4) for _ in range(group.size())]
    dist.all_gather(rows, x[:2], group=group)
    return torch.cat(rows)


def two_kinds(x, group):
    x = x.clone()
    work = dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group, async_op=True)
    dist.broadcast(y := x.new_ones(3), group_src=1, group=group)
    work.wait()
    out = torch.empty(1, 4)
    dist.reduce_scatter_tensor(out, x[:4].contiguous(), group=group)
    return out.sum() + y.sum() + x.sum()


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def trained(x, group):
    return Summed.apply(x, group) * 2


def complex_sum(x, group):
    z = torch.view_as_complex(x.view(8, 2, 2).clone())
    dist.all_reduce(z, group=group)
    return torch.view_as_real(z)


PROGRAMS = [ring, gathered_list, two_kinds, trained, complex_sum]


def launched(checks, function, group, trains):
    """What one run of a program, and of its backward if it trains, launches."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, requires_grad=trains)
    seen = []
    with checks.recorder.on(seen):
        out = function(x, group)
        if trains:
            out.sum().backward()
    return seen


def verdict(checks, function, group):
    trains = function is trained
    eager = launched(checks, function, group, trains)
    assert eager
    graphs = checks.showing.Graphs(checks.recorder)
    with dynamo_dist.enabled():
        compiled = torch.compile(function, backend=graphs.backend(), fullgraph=True)
        after = launched(checks, compiled, group, trains)
    return checks.showing.verdict(eager, after, graphs)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_compiled_program_launches_what_eager_launches(checks, mesh, program):
    found = verdict(checks, program, mesh["tp"].get_group())
    assert found["status"] == "same", found


def test_launches_of_dtensors_are_recorded(checks, mesh):
    """Their group is the mesh dimension's; the redistribution gathers 4 shards of 2 x 8 floats."""
    x = distribute_tensor(torch.randn(8, 8), mesh["tp"], [Shard(0)], src_data_rank=None)
    seen = []
    with checks.recorder.on(seen):
        x.redistribute(placements=[Replicate()]).to_local().sum()
    assert checks.showing.rows(seen) == [["all_gather", [0, 1, 2, 3], 256, "float32", "", -1]]


@pytest.mark.parametrize(("fault", "status"), FAULTS.items())
def test_a_planted_fault_is_found(checks, mesh, monkeypatch, fault, status):
    monkeypatch.setitem(registry.C10D, "all_reduce", getattr(checks.planted, fault))
    program = trained if fault != "unwaited" else _summed
    assert verdict(checks, program, mesh["tp"].get_group())["status"] == status


def _summed(x, group):
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def test_another_order_is_found(checks, mesh, monkeypatch):
    swapped = iter(["max", "sum"])

    def program(x, group):
        a, b = x.clone(), x.clone()
        dist.all_reduce(a, op=dist.ReduceOp.SUM, group=group)
        dist.all_reduce(b, op=dist.ReduceOp.MAX, group=group)
        return a + b

    monkeypatch.setattr(registry, "_reduce_op", lambda name, op: next(swapped))
    assert verdict(checks, program, mesh["tp"].get_group())["status"] == "order"


def test_partitioner_drops_collectives_of_dead_computation(enabled):
    """In the backward's copy of a forward: launch, wait, exp, dead launch."""
    graph = torch.fx.Graph()
    c10d = torch.ops._c10d_functional
    x = graph.placeholder("x")
    first = graph.call_function(
        c10d.wait_tensor.default,
        (graph.call_function(c10d.all_reduce.default, (x, "max", "0")),),
    )
    second = graph.call_function(torch.ops.aten.exp.default, (first,))
    graph.call_function(c10d.all_reduce.default, (second, "sum", "0"))
    graph.output(x)
    graph.eliminate_dead_code(is_impure_node=partitioners.is_not_collective)
    assert [node.op for node in graph.nodes] == ["placeholder", "output"]


def run(script, *options, plugin="dynamo_dist", fault=""):
    """Start a script of the corpus; its JSON lines when asked."""
    command = [CORPUS / script, "--plugin", plugin, *options]
    env = {
        **os.environ,
        "PYTHONPATH": str(CORPUS.parents[1]),
        "OMP_NUM_THREADS": "1",
        "PLANTED": fault,
    }
    return forked.Script(*command, cwd=CORPUS, env=env)


def records(process, timeout_s):
    out, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", "double"])
def test_both_checks_of_the_corpus_find_a_planted_fault(fault):
    case = ["--case", "megatron_copy_region"]
    processes = [
        run("launches.py", "--check", "eager_launches.json", *case, plugin="planted", fault=fault),
        run("exact_launches.py", *case, plugin="planted", fault=fault),
    ]
    for process in processes:
        (record,) = records(process, 120)
        assert record["status"] == "differ", record


@pytest.mark.slow
@pytest.mark.parametrize(
    "every", [3, pytest.param(1, marks=pytest.mark.sweep)], ids=["a third", "all"]
)
def test_the_corpus_launches_what_eager_launches(every, tmp_path):
    """By families, two processes; what does not compile in one graph is test_corpus's business,
    and so is another third.
    """
    # Of every three the second, and always what packs its launches.
    chosen = [
        record
        for at, record in enumerate(map(json.loads, _lines("upstream_2.13.0.jsonl")))
        if (at - 1) % every == 0 or record["name"] in PACKED
    ]
    families = sorted({record["family"] for record in chosen})
    processes = []
    for part in range(2):
        names = tmp_path / f"names{part}"
        half = set(families[part::2])
        names.write_text("\n".join(each["name"] for each in chosen if each["family"] in half))
        processes.append(run("exact_launches.py", "--names", names))
    found = [record for process in processes for record in records(process, 600)]
    assert len(found) == len(chosen)
    bad = {
        record["name"]: record
        for record in found
        if record["status"] not in ("same", "none", "no-graph")
    }
    assert sum(record["status"] == "same" for record in found) > 300 / every
    pieces = {name for name in PACKED & bad.keys() if bad[name]["status"] == "pieces"}
    assert {name: bad[name] for name in bad.keys() - pieces} == {}


def _lines(name):
    return (CORPUS / name).read_text().splitlines()
