"""Made-up profiles of two ranks, so that the truth is known: what of a device's kernels is which node's."""

import pytest

from inductor_passes.errors import TimesError, TopologyError
from inductor_passes.machine.importing.kineto_calls import calls
from inductor_passes.records import CollectiveRecord, NodeRecord
from inductor_passes.tuning.profile import times_of_profiles

NODES = (
    NodeRecord("mm", "kernel", "aten.mm.default", 10.0, dtype="float32", product=(1, 8, 8, 8)),
    NodeRecord("gather", "launch", "all_gather", 5.0, 0, hosts=1),
    NodeRecord("relu", "compute", "aten.relu.default", 3.0),
    NodeRecord("add", "compute", "aten.add.Tensor", 1.0),
    NodeRecord("exp", "compute", "aten.exp.default", 4.0),
    NodeRecord("wait", "wait", "wait", 0.0, 0),
    NodeRecord("mm_1", "kernel", "aten.mm.default", 10.0, dtype="float32", product=(1, 8, 8, 8)),
)
GATHER = CollectiveRecord("gather", "all_gather", "0", 2, 256, "float32", None, "", 5.0, 0.0, 0.0)


@pytest.fixture
def record(graph):
    return graph(nodes=NODES, collectives=(GATHER,))


class Profile:
    """Events of a profile, as the profiler has them; kernels are put in from the last to the first."""

    def __init__(self):
        self.events, self.now, self.number = [], 1000.0, 0

    def call(self, *kernels, mark="## Call CompiledFxGraph abc ##", tid=1):
        begin = self.now
        for name, us, *rest in kernels:
            self.now += 10.0
            self.number += 1
            (args,) = rest or ({},)
            host = {"correlation": self.number, "External id": args.get("External id", 0)}
            if name == "aten::mm":
                self.add("cpu_op", name, 5.0, {"External id": self.number}, tid)
                args, name = {"External id": self.number}, "sm80_xmma_gemm"
            self.add("cuda_runtime", "cudaLaunchKernel", 2.0, host, tid)
            self.events.insert(
                0,
                {
                    "ph": "X", "cat": "kernel", "name": name, "ts": 9e9 - self.now, "dur": us,
                    "args": {"correlation": self.number, **args},
                },
            )  # fmt: skip
        self.add("cuda_runtime", "cudaLaunchKernel", 2.0, {"correlation": 999}, tid + 1)
        self.now += 10.0
        self.add("cpu_op", mark, self.now - begin, {}, tid, begin)
        self.now += 10.0
        return self

    def add(self, cat, name, us, args, tid, ts=None):
        at = self.now if ts is None else ts
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "ts": at, "dur": us, "tid": tid, "args": args}
        )

    def trace(self):
        return {"traceEvents": self.events}


NCCL = {"Collective name": "_allgather_base", "Group size": 2}


def of_rank(product, gather, fused=(("triton_poi_fused_add_relu_0", 8.0),)):
    profile = Profile().call(("aten::mm", 900.0), ("ncclKernel", 900.0, NCCL), ("aten::mm", 900.0))
    for _ in range(3):
        profile.call(
            ("aten::mm", product),
            ("ncclDevKernel_AllGather", gather, NCCL),
            *fused,
            ("triton_poi_fused_exp_1", 6.0),
            ("aten::mm", 20.0),
        )
    profile.call(("aten::mm", 7.0), mark="## Call CompiledFxGraph other ##")
    return profile.trace()


def test_kernels_are_the_nodes_whose_names_they_bear(record):
    times = times_of_profiles(record, {0: of_rank(30.0, 50.0), 1: of_rank(40.0, 70.0)})
    assert times.nodes["mm"].us == 40.0  # of the slower rank
    assert times.launches["gather"].us == 50.0  # of the one that came last
    assert times.launches["gather"].payload_bytes == 256
    assert {name: times.nodes[name].us for name in ("relu", "add", "exp", "mm_1")} == {
        "relu": 6.0,
        "add": 2.0,
        "exp": 6.0,
        "mm_1": 20.0,
    }
    assert times.nodes["mm"].product == (1, 8, 8, 8)


def test_what_bears_no_node_is_shared_out_and_nothing_is_lost(record):
    fused = (("triton_poi_fused_add_relu_0", 8.0), ("Memcpy DtoD", 4.0))
    times = times_of_profiles(record, {0: of_rank(30.0, 50.0, fused)})
    assert times.nodes["exp"].us == pytest.approx(6.0 + 4.0 * 4 / 8)
    assert sum(n.us for n in times.nodes.values()) == pytest.approx(30 + 8 + 4 + 6 + 20)


def test_several_kernels_of_one_product_are_one():
    profile = Profile().call(("aten::mm", 5.0))
    profile.call(("splitKreduce", 2.0, {"External id": 1}), ("aten::mm", 1.0))
    first, second = calls(profile.trace(), "p")
    assert [(kernel.us, kernel.product) for kernel in first] == [(5.0, True)]
    assert [kernel.us for kernel in second] == [2.0, 1.0]


@pytest.mark.parametrize("spoil", ["collective", "product", "once"])
def test_calls_of_another_graph_are_none(record, spoil):
    trace = of_rank(30.0, 50.0)
    for event in trace["traceEvents"]:
        if spoil == "collective" and "Collective name" in event["args"]:
            event["args"]["Collective name"] = "allreduce"
        if spoil == "product" and event["name"] == "aten::mm":
            event["name"] = "aten::sin"
    if spoil == "once":
        trace = Profile().call(("aten::mm", 1.0), ("nccl", 1.0, NCCL), ("aten::mm", 1.0)).trace()
    with pytest.raises(TimesError, match=r"no second call of the .* graph"):
        times_of_profiles(record, {0: trace})


@pytest.mark.parametrize("bad", [{"dur": -1.0}, {"dur": float("nan")}, {"ts": "early"}])
def test_a_damaged_profile_is_refused(record, bad):
    trace = of_rank(30.0, 50.0)
    next(e for e in trace["traceEvents"] if e["cat"] == "kernel").update(bad)
    with pytest.raises(TopologyError):
        times_of_profiles(record, {0: trace})
