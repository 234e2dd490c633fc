"""The table of DTensor programs: the page says what the file of results says, and rows are as they were."""

import json

import in_graphs
import pytest
from comparison.in_graphs.page import faults, page
from comparison.in_graphs.row import known
from comparison.in_graphs.run import results, run

KEPT = json.loads(in_graphs.RESULTS.read_text())
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
    assert in_graphs.PAGE.read_text() == page(KEPT)


def test_every_row_has_a_result():
    assert list(KEPT["rows"]) == list(known())
    assert len(known()) >= 90


def test_rows_say_what_they_are():
    assert all(row.says.endswith((".", ":")) for row in known().values())


def test_none_is_wrong_or_worse_than_stock():
    assert not faults(KEPT["rows"])


def test_fifty_that_stock_fails_work():
    gained = [
        name
        for name, each in KEPT["rows"].items()
        if each["ours"]["class"] == "works" != each["stock"]["class"]
    ]
    assert len(gained) >= 50


@pytest.mark.slow
def test_sample_on_real_ranks(tmp_path):
    rows = {name: known()[name] for name in SAMPLE}
    run(rows, tmp_path, ("eager", "plugin", "ours"))
    found = results(rows, tmp_path)
    assert not faults(found)
    assert {name: each["ours"]["class"] for name, each in found.items()} == {
        name: KEPT["rows"][name]["ours"]["class"] for name in SAMPLE
    }
