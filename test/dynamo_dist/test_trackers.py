"""trace_instead: what is traced where a program calls a function that Dynamo cannot look into."""

import pytest
import torch

import dynamo_dist
from dynamo_dist import trackers
from dynamo_dist.errors import ConfigError
from dynamo_dist.testing import count_graph_breaks
from dynamo_dist.trackers import trace_instead


@torch.compiler.disable
def opaque(x, by=2):
    return x * by


def program(x):
    return opaque(x, by=3) + opaque(x)


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch):
    monkeypatch.setattr(trackers, "hooked", {})
    yield
    dynamo_dist.disable()
    torch.compiler.reset()


def breaks():
    torch.compiler.reset()
    return count_graph_breaks(program, torch.ones(2))


def test_the_replacement_is_traced_with_the_call_s_arguments():
    with dynamo_dist.enabled():
        assert breaks() == 2
        trace_instead(opaque)(lambda x, by=2: x * (by + 10))
        assert breaks() == 0
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [25.0, 25.0]
        assert program(torch.ones(2)).tolist() == [5.0, 5.0]  # eager is as it was
    assert breaks() == 2
    with dynamo_dist.enabled():
        assert breaks() == 0  # again in force


def test_a_second_one_takes_the_place_of_the_first():
    trace_instead(opaque)(lambda x, by=2: x - 1)
    with dynamo_dist.enabled():
        trace_instead(opaque)(lambda x, by=2: x * by)
        compiled = torch.compile(program, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2)).tolist() == [5.0, 5.0]


@pytest.mark.parametrize(("function", "replacement"), [(3, print), (print, None)])
def test_what_cannot_be_called_is_refused(function, replacement):
    with pytest.raises(ConfigError, match="which is no function"):
        trace_instead(function)(replacement)
    assert not trackers.patches()
