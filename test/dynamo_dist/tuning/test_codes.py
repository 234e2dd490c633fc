"""Which compiled graphs are noted, to be timed: those whose time a clock of the host shows, or a profile."""

import types

import pytest
from torch._inductor.utils import BoxedBool

from dynamo_dist.torch_compat.inductor.code import note_compiled_code


def compiled(**fields):
    known = {
        "source_code": "def call(args): ...",
        "current_callable": print,
        "counter_deltas": {"inductor_passes.record.abc": 1},
        "device_types": {"cpu"},
    }
    return types.SimpleNamespace(**{**known, **fields})


@pytest.fixture
def noted():
    seen = []
    (change,) = note_compiled_code(lambda owner, *what: seen.append(what))
    post_compile = change.wrap(lambda graph, *_: setattr(graph, "current_callable", len))
    return lambda *how, **fields: post_compile(compiled(**fields), *how) or seen


def test_a_graph_is_noted_with_its_own_function_not_what_is_put_around_it(noted):
    assert noted() == [(print, "def call(args): ...", ("inductor_passes.record.abc",), "cpu")]


@pytest.mark.parametrize(
    ("how", "runs"),
    [
        (([], None, {"cudagraphs": BoxedBool(False)}), "cuda"),
        (([], None, {"cudagraphs": BoxedBool(True)}), "cuda graph"),
        ((), "cuda graph"),  # nothing says that it is none
    ],
)
def test_code_that_a_cuda_graph_replays_is_told_from_code_that_runs(noted, how, runs):
    (found,) = noted(*how, device_types={"cpu", "cuda"})
    assert found[-1] == runs


@pytest.mark.parametrize(
    "fields",
    [
        {"device_types": {"xpu"}},
        {"device_types": {"cpu", "xpu"}},
        {"source_code": None},
        {"current_callable": None},
    ],
)
def test_what_nothing_here_can_time_is_not(noted, fields):
    assert noted(**fields) == []
