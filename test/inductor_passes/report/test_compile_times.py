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
    assert found["Dynamo's trace"] > 0


def test_each_timer_counts_in_one_stage():
    timers = {
        FRAMES: 100.0,
        "OutputGraph.call_user_compiler": 80.0,
        "build_guards": 5.0,
        "create_aot_dispatcher_function": 70.0,
        "compile_fx_inner": 60.0,
        "compile_fx.<locals>.bw_compiler": 20.0,
        "backward._backward_impl": 21.0,  # its first call, after all frames
        "_recursive_joint_graph_passes": 4.0,
        "_recursive_post_grad_passes": 10.0,
        "pass.post_grad_passes.post_grad_custom_post_pass": 6.0,
        "PyCodeCache.load_by_key_path": 15.0,
    }
    assert stages(timers) == {
        "Dynamo's trace": 15.0,
        "guards": 5.0,
        "AOTAutograd": 26.0,
        "torch's graph passes": 8.0,
        "the plugin's passes": 6.0,
        "waiting for other ranks": 0.0,
        "Inductor's code": 35.0,
        "C++ or Triton": 15.0,
        "the rest": 10.0,
    }


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
