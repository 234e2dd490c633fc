"""Where the seconds of compiles went."""

import time

import pytest
import torch
from torch._dynamo.utils import compilation_time_metrics

from inductor_passes.torch_compat import dynamo
from inductor_passes.torch_compat.compile_times import seconds_by_stage, stages

FRAMES = "_compile.compile_inner"


@pytest.fixture(autouse=True)
def no_times_from_before(monkeypatch):
    for name in list(compilation_time_metrics):
        monkeypatch.delitem(compilation_time_metrics, name)


def test_nothing_is_said_before_the_first_compile():
    assert seconds_by_stage() == {}


@pytest.mark.parametrize("trained", [False, True])
def test_stages_of_a_compile_add_up_to_all_of_it(trained):
    torch._dynamo.reset()
    x = torch.ones(5, requires_grad=trained)
    y = torch.compile(lambda x: x.sin().exp() * 1.5, backend="dynamo_dist")(x)
    if trained:
        y.sum().backward()
    found = seconds_by_stage()
    late = compilation_time_metrics.get("backward._backward_impl", [])
    everything = sum(compilation_time_metrics[FRAMES]) + sum(late)
    assert sum(found.values()) == pytest.approx(everything, rel=0.02)
    assert found["waiting for other ranks"] == 0
    for stage in ("Dynamo's trace", "AOTAutograd", "Inductor's code"):
        assert found[stage] > 0, found


def test_a_wait_counts_once_and_in_no_other_stage():
    with dynamo.waiting("compile"), dynamo.waiting("votes"):
        time.sleep(0.05)
    waited = sum(compilation_time_metrics[f"{dynamo.WAIT_TIMER}.compile"])
    assert waited >= 0.05
    assert f"{dynamo.WAIT_TIMER}.votes" not in compilation_time_metrics
    timers = {FRAMES: 9.0, "OutputGraph.call_user_compiler": 6.0}
    timers |= {"create_aot_dispatcher_function": 5.0, f"{dynamo.WAIT_TIMER}.compile": 2.0}
    found = stages(timers)
    assert found["waiting for other ranks"] == 2.0
    assert (found["Dynamo's trace"], found["AOTAutograd"], found["the rest"]) == (3.0, 3.0, 1.0)
