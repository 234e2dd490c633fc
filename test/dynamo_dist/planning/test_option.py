"""The option ``plan``: what it takes, and when it is known."""

from pathlib import Path

import pytest

import dynamo_dist
from dynamo_dist import graph_compile
from dynamo_dist.planning import feature
from inductor_passes.errors import OptionError
from inductor_passes.pass_options import PassOptions, split


@pytest.fixture(autouse=True)
def registered():
    graph_compile.register_options()


def test_a_word_that_is_no_plan_is_refused():
    with pytest.raises(OptionError, match=r"'plan' is 'mend'.*\n*.*'off', 'repair'"):
        split({"plan": "mend"})
    with pytest.raises(OptionError, match="'plan' is 'mend'"):
        dynamo_dist.enable(inductor={"plan": "mend"})


def test_a_file_may_be_a_path():
    assert split({"plan": Path("a") / "plan.json"})[0].extra == {"plan": "a/plan.json"}
    assert split({"plan": "off"})[0] == PassOptions()


def test_a_compile_without_a_plan_is_handed_on():
    def compile_(*given):
        return given

    assert feature.compile_planned("graph", ["input"], compile_, PassOptions()) == (
        "graph",
        ["input"],
    )
