"""The table of optimizers: the page says what the file of results says, and rows are as they
were.
"""

import json

import optimizers
import pytest

KEPT = json.loads(optimizers.RESULTS.read_text())


def test_page_says_what_the_results_say():
    assert optimizers.PAGE.read_text() == optimizers.page(KEPT)


def test_every_program_has_a_result():
    found = {(title, kind) for title, row in KEPT["optimizers"].items() for kind in row}
    assert found == {(f"{name} {form}", kind) for name, form, kind in optimizers.programs("")}


def test_none_ends_with_an_error_or_other_numbers():
    states = {each["state"] for row in KEPT["optimizers"].values() for each in row.values()}
    assert states <= {optimizers.ONE_GRAPH, "2 graphs", "breaks", "upstream"}


@pytest.mark.slow
def test_rows_are_as_they_were():
    for title, row in optimizers.measured("Adagrad").items():
        states = {kind: each["state"] for kind, each in KEPT["optimizers"][title].items()}
        assert {kind: each["state"] for kind, each in row.items()} == states
