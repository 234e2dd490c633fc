"""Measurements in, predictions out: what was measured counts, and bad files are refused in one
line.
"""

import gzip
import json

import pytest
import torch

from inductor_passes.__main__ import main
from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.cost.collectives import GroupShape, collective_us
from inductor_passes.testing import trace

HEAD = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8388608 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{ranks}
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = """\
           0             0     float     sum      -1     0.05    0.00    0.00      0     0.05    0.00    0.00      0
     1048576        262144     float     sum      -1    105.9    9.90   17.33      0    305.7    9.92   17.37      0
     2097152        524288     float     sum      -1    145.9    9.90   17.33      0    305.7    9.92   17.37      0
     4194304       1048576     float     sum      -1    125.0   23.68   41.44      0    376.7   23.74   41.55      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 17.3
"""
# Versions up to 2.9 have no column "root".
OLD = """\
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144   float     sum    100.0   10.49   18.35  0e+00    101.0   10.38   18.17  0e+00
"""


def ranks(count, nodes):
    per_node = count // nodes
    return "\n".join(
        f"#  Rank {i:2} Group  0 Pid  425 on host-{i // per_node} device {i % per_node:2} [0xd6] "
        "NVIDIA H100"
        for i in range(count)
    )


def imported(tmp_path, capsys, files, *options, base="h100x8"):
    """The topology that comes of some files, and what the command says."""
    paths = []
    for name, content in files.items():
        paths.append(tmp_path / name)
        data = content if isinstance(content, str) else json.dumps(content)
        paths[-1].write_bytes(
            gzip.compress(data.encode()) if name.endswith("gz") else data.encode()
        )
    out = tmp_path / "mine.json"
    command = ["costs", "import", *map(str, paths), "--topology", base, "-o", str(out), "--json"]
    assert main([*command, *options]) == 0
    return load_topology(out), json.loads(capsys.readouterr().out)


def test_collectives_are_what_was_measured(tmp_path, capsys):
    files = {"all_reduce_perf.txt": HEAD.format(ranks=ranks(16, 2)) + ROWS}
    topology, said = imported(tmp_path, capsys, files)
    assert topology.name == "mine"
    group = GroupShape(16, 2)

    def us(payload, group=group):
        return collective_us("all_reduce", payload, group, topology)

    # Time out of place; a message that took longer than a larger one is taken at the larger one's.
    assert (us(1), us(2**20), us(2**21), us(2**22)) == (105.9, 105.9, 125.0, 125.0)
    assert us(1.5 * 2**20) == pytest.approx((105.9 + 125.0) / 2)
    assert us(2**24) == 4 * 125.0
    formulas = load_topology("h100x8")
    assert us(2**20, GroupShape(8, 1)) == collective_us(
        "all_reduce", 2**20, GroupShape(8, 1), formulas
    )
    (table,) = said["tables"]
    assert (table["table"], table["points"]) == ("all_reduce, 16 ranks on 2 nodes", 3)
    predicted = [collective_us("all_reduce", 2**k, group, formulas) for k in (20, 21, 22)]
    off = [abs(p / m - 1) for p, m in zip(predicted, (105.9, 145.9, 125.0), strict=True)]
    assert table["worst_error_percent"] == round(100 * max(off), 1)


def test_a_gather_counts_gathered_bytes(tmp_path, capsys):
    text = "# Collective test starting: all_gather_perf\n" + HEAD.format(ranks=ranks(8, 1)) + ROWS
    topology, _ = imported(tmp_path, capsys, {"log.txt": text})
    assert (
        collective_us("all_gather", 2**22 // 8, GroupShape(8, 1), topology) == 125.0
    )  # of 4 MiB gathered


def test_files_add_up_and_options_say_what_outputs_do_not(tmp_path, capsys):
    files = {"a.txt": OLD, "b.txt": OLD.replace("1048576 ", "2097152 ").replace("100.0", "150.0")}
    topology, _ = imported(
        tmp_path, capsys, files, "--kind", "alltoall", "--ranks", "4", "--nodes", "1"
    )
    (table,) = topology.collectives
    assert (table.kind, table.ranks, table.nodes) == ("all_to_all", 4, 1)
    assert table.points == ((2**20, 100.0), (2**21, 150.0))
    again, _ = imported(
        tmp_path,
        capsys,
        {"c.txt": OLD.replace("100.0", "90.0")},
        *("--kind", "alltoall", "--ranks", "4", "--nodes", "1"),
        base=str(tmp_path / "mine.json"),
    )
    assert again.collectives[0].points == ((2**20, 90.0), (2**21, 150.0))


def kernel(us, **args):
    return {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": us, "args": args}


def collective(us, name="_allgather_base", ranks="[0, 8]", **more):
    metadata = {
        "Collective name": name,
        "dtype": "BFloat16",
        "In msg nelems": 1024,
        "Out msg nelems": 2048,
        "Group size": 2,
        "Process Group Ranks": ranks,
        "In split size": "[]",
        "Out split size": "[]",
    }
    return kernel(us, **(metadata | more))


def product(name, identifier, *shapes, dtype="c10::BFloat16", us=500):
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "ts": 0,
        "dur": us,
        "args": {
            "External id": identifier,
            "Input Dims": list(shapes),
            "Input type": [dtype] * len(shapes),
        },
    }


def test_profiles_of_a_gpu(tmp_path, capsys):
    swapped = {"name": "all_to_allv", "ranks": "[0, 1, 2, ...]", "Group size": 16}
    events = [
        *(collective(us) for us in (31.0, 30.0, 90.0)),
        collective(50.0, **swapped),
        collective(51.0, **swapped, **{"In split size": [1] * 15 + [2]}),
        product("aten::mm", 7, [64, 128], [128, 256]),
        kernel(12.0, **{"External id": 7}),
        product("aten::addmm", 8, [256], [64, 128], [128, 256]),
        kernel(11.0, **{"External id": 8}),
        product("aten::bmm", 9, [4, 64, 128], [4, 128, 256]),
        kernel(20.0, **{"External id": 9}),
        product("aten::mm", 10, [], []),
    ]
    profile = {"traceEvents": events, "distributedInfo": {"world_size": 16}}
    topology, said = imported(tmp_path, capsys, {"trace.json.gz": profile})
    gather, swap = topology.collectives
    assert (gather.kind, gather.ranks, gather.nodes, gather.points) == (
        "all_gather",
        2,
        2,
        ((2048.0, 30.0),),
    )
    assert (swap.kind, swap.ranks, swap.nodes, swap.points) == (
        "all_to_all",
        16,
        2,
        ((2048.0, 50.0),),
    )
    products = next(p for p in topology.products if p.dtype == "bfloat16")
    assert products.points == (((1, 64, 128, 256), 11.0), ((4, 64, 128, 256), 20.0))
    assert len(said["tables"]) == 3

    graph = trace(
        lambda a, b, c: (a @ b, a @ c),
        *([64, 128], [128, 256], [128, 512]),
        dtype=torch.bfloat16,
    )
    same, wider = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    model = TopologyCostModel(topology)
    assert model.compute_us(same) == 11.0
    assert model.compute_us(wider) == pytest.approx(
        14.0
    )  # twice the operations: a third of the way to four
    assert model.digest() != TopologyCostModel(load_topology("h100x8")).digest()


def test_a_profile_of_the_cpu(tmp_path, capsys):
    with torch.profiler.profile(record_shapes=True) as profile:
        torch.ones(32, 48) @ torch.ones(48, 16)
    profile.export_chrome_trace(str(tmp_path / "exported.json"))
    content = json.loads((tmp_path / "exported.json").read_text())
    topology, _ = imported(tmp_path, capsys, {"trace.json": content}, base="cpu-gloo")
    (products,) = topology.products
    assert products.dtype == "float32"
    assert [shape for shape, _ in products.points] == [(1, 32, 48, 16)]


def gloo(us, *shapes, dtype="float", kind="all_gather"):
    arguments = {"Input Dims": list(shapes), "Input type": [dtype] * len(shapes)}
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"gloo:{kind}",
        "dur": us,
        "args": arguments,
    }


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ([{"ranks": [0, 1]}], [("all_gather", 2, 1, ((32.0, 7.0), (64.0, 9.0))), ("all_reduce", 2, 1, ((16.0, 5.0),))]),
        ([{"ranks": [0, 9]}], [("all_gather", 2, 2, ((32.0, 7.0), (64.0, 9.0))), ("all_reduce", 2, 2, ((16.0, 5.0),))]),
        ([{"ranks": [0, 1]}, {"ranks": [0]}], []),
        ([{"ranks": [0, 0]}], []),
        ([{"ranks": [0]}], []),
        ([{}], []),
        (None, []),
    ],
)  # fmt: skip
def test_gloos_spans_count_where_the_job_has_one_group(tmp_path, capsys, groups, found):
    spans = [
        gloo(9.0, [2, 8]),
        gloo(8.0, [8]),
        gloo(7.0, [4, 2]),
        gloo(5.0, [2], dtype="double", kind="all_reduce"),
    ]
    spans += [gloo(1.0, [2], [2]), gloo(1.0, [2], dtype="c10::Odd"), gloo(1.0, [2], kind="barrier"), gloo(0, [2])]  # fmt: skip
    spans += [gloo(1.0, 3), gloo(1.0, [0]), product("aten::mm", 1, [64, 128], [128, 256], us=3.0)]
    info = {"world_size": 16, "pg_config": groups}
    content = {"traceEvents": spans, "distributedInfo": info}
    topology, _ = imported(tmp_path, capsys, {"trace.json": content})
    assert [
        (t.kind, t.ranks, t.nodes, t.points) for t in topology.collectives if t.ranks == 2
    ] == found


def events(event):
    """A profile whose second event is this one."""
    return json.dumps({"traceEvents": [{"ph": "M", "name": {}}, event]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (OLD, "does not say which benchmark"),
        ("# Collective test starting: all_reduce_perf\n" + OLD, "does not say on how many ranks"),
        ("# Collective test starting: all_reduce_perf\n" + ranks(2, 1), "has no row of times"),
        (
            "# Collective test starting: all_reduce_perf\n" + ranks(2, 1) + "\n" + OLD.replace("100.0", "N/A"),
            "has no time in column 5",
        ),
        (
            "# Collective test starting: all_reduce_perf\n" + ranks(2, 1) + "\n" + OLD.replace("(us)", "(ms)"),
            "not in microseconds",
        ),
        ("{", "is not JSON"),
        ("[]", 'it must have type "object"'),
        ('{"traceEvents": []}', "no collective and no matrix product"),
        (events(collective(None)), "'traceEvents[1].dur' is null, but it must have type"),
        (events(collective(9, **{"Group size": 10**12})), "'traceEvents[1].args.Group size' is 1000000000000"),
        (events(collective(9, ranks=[0, None])), "'traceEvents[1].args.Process Group Ranks[1]' is null"),
        (events(product("aten::mm", 1, us=[])), "'traceEvents[1].dur' is an empty list"),
        ("# Collective test starting: all_reduce_perf\n" + ranks(2, 1) + "\n" + OLD.replace("100.0", "inf"),
         "has no time in column 5"),
        ("\n" * (9 << 20), "has more than 8 million characters"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_line(tmp_path, capsys, content, message):
    path = tmp_path / "log.txt"
    path.write_text(content)
    out = tmp_path / "mine.json"
    command = ["costs", "import", str(path), "--topology", "h100x8", "-o", str(out)]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not out.exists()


def test_events_that_say_nothing_of_costs_may_say_what_they_like(tmp_path, capsys):
    others = [None, 3, {"ph": "X", "name": []}, {"ph": "X", "cat": {}, "args": 7, "dur": "x"}]
    broken = [product("aten::mm", 1, [64], 7), collective(9, **{"In split size": "[--5, ²]"})]
    content = {"traceEvents": [*others, *broken, collective(30.0)], "distributedInfo": None}
    topology, _ = imported(tmp_path, capsys, {"trace.json": content})
    assert [table.points for table in topology.collectives] == [((2048, 9.0),)]
