import operator

import pytest
import torch

from inductor_passes.graph import collectives as c
from inductor_passes.testing import trace

c10d = torch.ops._c10d_functional


def exchange(x, y):
    sent = c10d.batch_p2p_ops(["isend", "irecv"], [1, 1], [0, 0], [x, y], "0")
    return [c10d.wait_tensor(t) for t in sent]


def coalesced(x, y):
    outs = c10d.all_reduce_coalesced([x, y], "avg", "0")
    return [c10d.wait_tensor(t) for t in outs]


PROGRAMS = {
    "all_reduce": (lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), "sum", 64),
    "all_gather": (
        lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 8, "0")),
        None,
        64,
    ),
    "reduce_scatter": (
        lambda x: c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "max", 8, "0")),
        "max",
        64,
    ),
    "all_to_all": (
        lambda x: c10d.wait_tensor(c10d.all_to_all_single(x, [2] * 8, [2] * 8, "0")),
        None,
        64,
    ),
    "broadcast": (lambda x: c10d.wait_tensor(c10d.broadcast(x, 0, "0")), None, 64),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_is_known_of_a_launch(kind):
    program, reduce_op, payload = PROGRAMS[kind]
    graph = trace(program, [16])
    (launch,) = c.launches(graph)
    assert c.kind(launch) == kind
    assert c.group_name(launch) == "0"
    assert c.reduce_op(launch) == reduce_op
    assert c.payload_bytes(launch) == payload
    (wait,) = c.waits_of(launch)
    assert c.launch_of(wait) is launch


def test_a_coalesced_launch_has_a_wait_for_each_tensor():
    graph = trace(coalesced, [4], [8])
    (launch,) = c.launches(graph)
    assert (c.kind(launch), c.reduce_op(launch)) == ("all_reduce", "avg")
    assert c.payload_bytes(launch) == 48
    assert len(c.waits_of(launch)) == 2
    assert all(c.launch_of(wait) is launch for wait in c.waits_of(launch))
    assert sum(n.target is operator.getitem for n in graph.nodes) == 2


@pytest.mark.skipif(not hasattr(c10d, "batch_p2p_ops"), reason="this torch has no such op")
def test_a_batch_of_point_to_point_is_one_launch():
    graph = trace(exchange, [4], [8])
    (launch,) = c.launches(graph)
    assert c.kind(launch) == "batch_p2p"
    assert c.payload_bytes(launch) == 48


def test_sizes_unknown_while_tracing_count_by_their_hint():
    graph = trace(PROGRAMS["all_reduce"][0], [16], dynamic=True)
    assert c.payload_bytes(c.launches(graph)[0]) == 64
