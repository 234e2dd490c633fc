"""The table of DTensor programs: the page says what the file of results says, and rows are as
they were.
"""

import json

import pytest
from comparison import ranks
from comparison.outcome import End
from comparison.pages import CLASSES, GRAPHS, RESULTS, page, rows_of, strategies
from comparison.parts import PARTS
from comparison.row import known

KEPT = json.loads(RESULTS.read_text())
# One or two of most sections.
SAMPLE = (
    "embedding_returned",
    "embeddings_pending_at_once",
    "embedding_reduced_twice",
    "output_and_its_view",
    "local_map_uneven",
    "bincount_of_shards",
    "mesh_equal_to_an_earlier_one",
    "hook_that_reduces",
    "equal",
    "unlike_lengths",
    "fully_sharded",
    "attention_heads",
    "plain_added",
)


def test_page_says_what_the_results_say():
    assert GRAPHS.read_text() == page(KEPT)


def test_every_row_has_a_result():
    assert list(KEPT["rows"]) == list(known())
    assert len(known()) >= 90


def test_rows_say_what_they_are():
    assert all(row.says.endswith((".", ":")) for row in known().values())


def test_none_is_wrong_or_worse_than_upstream():
    for name, each in KEPT["rows"].items():
        assert each["ours"]["class"] in ("works", "breaks", "refuses"), name
        assert each["upstream"]["class"] != "works" or each["ours"]["class"] == "works", name


def test_fifty_that_upstream_fails_work():
    gained = [
        name
        for name, each in KEPT["rows"].items()
        if each["ours"]["class"] == "works" != each["upstream"]["class"]
    ]
    assert len(gained) >= 50


def test_a_rows_end_is_a_class_of_the_page():
    ends = {name: End(name) for name in ("right", "breaks", "refuses", "error", "wrong", "hang")}
    rows = rows_of({"upstream": ends, "ours": ends})
    assert [row["ours"]["class"] for row in rows.values()] == list(CLASSES)


def test_what_not_all_ranks_refuse_is_an_error():
    refuses = End("refuses", "not done")
    assert ranks.merged([refuses, refuses]).status == "refuses"
    assert ranks.merged([refuses, End("right")]).status == "error"
    assert ranks.merged([End("right"), End("wrong")]).status == "wrong"
    assert ranks.merged([End("wrong"), End("hang")]).status == "hang"


def test_operators_that_are_not_ok_have_a_row():
    ends = {
        "upstream": {"add": End("right"), "sum": End("wrong", "wrong (2 of 9): off")},
        "ours": {"add": End("right"), "sum": End("right")},
    }
    text = strategies(ends)
    assert "| upstream | 2 operators: 1 ok, 1 wrong |" in text
    assert "| `sum` | wrong (2 of 9) | ok |" in text and "`add`" not in text


@pytest.mark.slow
def test_sample_on_real_ranks():
    found = dict(ranks.run(PARTS["graphs"], list(SAMPLE), "ours", 60.0))
    rows = rows_of({"upstream": found, "ours": found})
    assert {name: each["ours"]["class"] for name, each in rows.items()} == {
        name: KEPT["rows"][name]["ours"]["class"] for name in SAMPLE
    }
