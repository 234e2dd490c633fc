"""The group of paced copies: collectives among equal ranks, on a stream of their own; and the
figures of steps.
"""

import contextlib
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
import cuda_timed_group as twin
import gpu_schedule

c10d = torch.ops._c10d_functional
CALLS = {
    "all_gather": (lambda x: c10d.all_gather_into_tensor(x, 4, "0"), lambda x: x.repeat(4, 1)),
    "reduce_scatter": (
        lambda x: c10d.reduce_scatter_tensor(x, "sum", 4, "0"),
        lambda x: 4 * x[: len(x) // 4],
    ),
    "average": (
        lambda x: c10d.reduce_scatter_tensor(x, "avg", 4, "0"),
        lambda x: x[: len(x) // 4],
    ),
    "all_to_all": (
        lambda x: c10d.all_to_all_single(x, [2] * 4, [2] * 4, "0"),
        lambda x: x,
    ),
    "all_reduce": (lambda x: c10d.all_reduce(x, "sum", "0"), lambda x: 4 * x),
    "coalesced": (
        lambda x: c10d.all_gather_into_tensor_coalesced([x], 4, "0")[0],
        lambda x: x.repeat(4, 1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_are_those_of_equal_ranks(name):
    call, wanted = CALLS[name]
    x = torch.randn(8, 3)
    with twin.cuda_timed_group(4), twin.link(lambda *_: 5.0, "none"):
        assert torch.equal(c10d.wait_tensor(call(x.clone())), wanted(x))
        assert twin.Link.total_us == 5.0


class Recorded:
    """Streams, events and launches, as they come."""

    def __init__(self):
        self.said = []

    def Stream(self, priority=0):
        return self

    def Event(self):
        return self

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_stream(self):
        return self

    def wait_stream(self, other):
        self.said.append("side waits for compute")

    def record(self):
        self.said.append("done")

    def wait_event(self, event):
        self.said.append("compute waits for side")

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.said.append(("copy", args[-2]))


def test_timed_collective_copies_on_a_stream_and_waits_by_event(monkeypatch):
    device = Recorded()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    monkeypatch.setattr(twin, "paced_copy_kernel", device)
    with twin.cuda_timed_group(4), twin.link(lambda *_: 6.0):
        inputs = [torch.ones(8), torch.ones(16)]
        first, second = c10d.reduce_scatter_tensor_coalesced(inputs, "avg", 4, "0")
        begun = list(device.said)
        c10d.wait_tensor(first)
        c10d.wait_tensor(second)
    assert begun == ["side waits for compute", ("copy", 1.0), ("copy", 1.0), "done"]
    assert device.said[4] == "compute waits for side"


@pytest.mark.parametrize(
    ("step", "compute", "link", "over", "hidden"),
    [
        (30.0, 20.0, 10.0, 1.5, 0.0),
        (20.0, 20.0, 10.0, 1.0, 1.0),
        (44.0, 20.0, 40.0, 1.1, 0.8),
        (5.0, 5.0, 0.0, 1.0, 1.0),
    ],
)
def test_figures(step, compute, link, over, hidden):
    found = gpu_schedule.figures(step, compute, link)
    assert found["over_longer"] == pytest.approx(over)
    assert found["hidden_share"] == pytest.approx(hidden)
