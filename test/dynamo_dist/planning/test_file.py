import concurrent.futures
import json
import runpy
import time
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from dynamo_dist.errors import PlanError
from dynamo_dist.planning import file
from dynamo_dist.planning.planner import Plan
from dynamo_dist.program import Choice, upstream_choice

problems = runpy.run_path(str(Path(__file__).with_name("problems.py")))


def stored():
    program = problems["chain"](1)
    sharded = Choice((("S0",),), (("S0",),))
    choices = (sharded, upstream_choice(program.steps[1]))
    return file.StoredPlan.of(Plan(program, choices, (22.0, 0.0), (0.0, 0.0), 0.0, "greedy", 0.1))


def test_a_line_a_step():
    assert_expected_inline(
        file.text_of({"abc": stored()}),
        """\
{"schema": 1, "plans": {
  "abc": {"summary": {"method": "greedy", "upstream_us": [22.0, 0.0], "planned_us": [0.0, 0.0], "bound_us": 0.0}, "steps": [
    {"step": 0, "op": "aten.sin.default(*)", "upstream": ["R"], "inputs": ["S0"], "outputs": ["S0"]},
    {"step": 1, "op": "redistribute", "upstream": ["S0"], "inputs": ["S0"], "outputs": ["S0"]}
  ]}
}}
""",
    )


def test_what_was_saved_is_loaded(tmp_path):
    path = str(tmp_path / "folder" / "plan.json")
    assert file.load_plans(path) == {}
    file.save_plan(path, {"abc": stored()})
    assert file.load_plans(path) == {"abc": stored()}
    assert stored().changes == 1


def test_an_edited_line_is_followed(tmp_path):
    path = tmp_path / "plan.json"
    file.save_plan(str(path), {"abc": stored()})
    path.write_text(path.read_text().replace('"inputs": ["S0"]', '"inputs": ["S1"]', 1))
    assert file.load_plans(str(path))["abc"].script()[0].inputs == (("S1",),)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99, "plans": {}}', '{"schema": 1}'])
def test_what_is_no_plan_is_said(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"Plan file '.*plan.json'.*Or delete it to plan anew\."):
        file.load_plans(str(path))


@pytest.mark.parametrize("word", ["", "S", "Sx", "s0", "R | ", "shard"])
def test_a_word_that_is_no_placement_is_named_with_its_place(tmp_path, word):
    path = tmp_path / "plan.json"
    file.save_plan(str(path), {"abc": stored()})
    path.write_text(path.read_text().replace('"inputs": ["S0"]', f'"inputs": ["{word}"]', 1))
    with pytest.raises(
        PlanError, match=r"'plans\.abc\.steps\[0\]\.inputs\[0\]' is .* must be R, S0, P"
    ):
        file.load_plans(str(path))


def test_it_is_json(tmp_path):
    assert json.loads(file.text_of({"a": stored(), "b": stored()})).keys() == {"schema", "plans"}


def test_one_makes_it_and_the_others_find_it(tmp_path):
    path = str(tmp_path / "new" / "plan.json")
    makers = []

    def need(_):
        with file.one_at_a_time(path):
            if not file.load_plans(path):
                makers.append(1)
                time.sleep(0.1)
                file.save_plan(path, {"abc": stored()})
            return file.load_plans(path)

    with concurrent.futures.ThreadPoolExecutor() as threads:
        found = list(threads.map(need, range(4)))
    assert found == [{"abc": stored()}] * 4
    assert makers == [1]


def test_who_cannot_lock_or_has_waited_long_enough_goes_on(tmp_path):
    path = str(tmp_path / "plan.json")
    (tmp_path / "file").touch()
    with file.one_at_a_time(path), file.one_at_a_time(path, wait_s=0.05):
        pass
    with file.one_at_a_time(str(tmp_path / "file" / "plan.json")):
        pass


def test_an_error_inside_is_the_caller_s(tmp_path):
    with pytest.raises(OSError, match="full"), file.one_at_a_time(str(tmp_path / "plan.json")):
        raise OSError("full")
