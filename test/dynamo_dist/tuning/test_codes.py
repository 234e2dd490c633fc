"""Which compiled graphs are noted, to be timed: those whose time a clock of the host shows."""

import types

import pytest

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
    post_compile = change.wrap(lambda graph: setattr(graph, "current_callable", len))
    return lambda **fields: post_compile(compiled(**fields)) or seen


def test_a_graph_is_noted_with_its_own_function_not_what_is_put_around_it(noted):
    assert noted() == [(print, "def call(args): ...", ("inductor_passes.record.abc",))]


@pytest.mark.parametrize(
    "fields",
    [
        {"device_types": {"cuda"}},
        {"device_types": {"cpu", "cuda"}},
        {"source_code": None},
        {"current_callable": None},
    ],
)
def test_what_a_hosts_clock_cannot_time_is_not(noted, fields):
    assert noted(**fields) == []
