"""Numbers as people read them."""

import pytest

from inductor_passes.report import figures


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.50 KiB"),
        (33 * 1024 * 1024 // 2, "16.5 MiB"),
        (21.4e9, "19.9 GiB"),
    ],
)
def test_bytes(count, text):
    assert figures.human_bytes(count) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (0, "0"),
        (1e-9, "0"),
        (0.25, "250 ns"),
        (12.345, "12.3 µs"),
        (999.7, "1000 µs"),
        (1234.5, "1.23 ms"),
        (615_900, "616 ms"),
        (4.56e6, "4.56 s"),
    ],
)
def test_times(us, text):
    assert figures.human_us(us) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234567, "1\u202f234\u202f567"),
        (0.000123456, "0.0001235"),
        (902.75, "902.8"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_numbers(value, text):
    assert figures.human_number(value) == text


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        (100, 17, "\N{MINUS SIGN}83 %"),
        (1000, 1023, "+2.3 %"),
        (5, 5, "same"),
        (0, 0, ""),
        (0, 3, "new"),
    ],
)
def test_changes(before, after, text):
    assert figures.change(before, after) == text


def test_counts():
    assert figures.count_of(1, "graph") == "1 graph"
    assert figures.count_of(0, "graph") == "0 graphs"
    assert figures.count_of(2, "index", "indices") == "2 indices"


def test_ranks():
    assert figures.rank_list([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert figures.rank_list([]) == ""


def test_facts():
    assert figures.fact_text((5.5, 4.0, 2.25)) == "5.5 → 2.25"
    assert figures.fact_text((5.5,)) == "5.5"
    assert figures.fact_text(()) == "none"
    assert figures.fact_text("as it is") == "as it is"
    assert figures.fact_text(12.25, "ms") == "12.25 ms"
    assert figures.fact_text((1 << 20, 3 << 20), "bytes") == "1 MiB → 3 MiB"


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("/a/b.py:12: x = f(y)", ("b.py:12", "x = f(y)")),
        ("C:\\a\\b.py:12: x: int = 3", ("b.py:12", "x: int = 3")),
        ("/a/b.py:12", ("b.py:12", "")),
        ("no line at all", ("no line at all", "")),
        ("", ("", "")),
    ],
)
def test_lines(line, parts):
    assert figures.split_line(line) == parts
