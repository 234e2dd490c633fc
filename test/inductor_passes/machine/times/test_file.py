"""A table of times survives its file, and whatever is no table of this job counts as none, with one line."""

import dataclasses
import json

import pytest

from inductor_passes.errors import TimesError
from inductor_passes.machine.times.file import of_text, read, to_text
from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime, Times

GRAPH = GraphTimes(
    "forward",
    {
        "mm": NodeTime("aten.mm.default", 12.5, 10.0, "float32", (1, 8, 16, 32)),
        "relu": NodeTime("aten.relu.default", 2.0, 1.0),
    },
    {"gather": LaunchTime("all_gather", 2, 1, 4096, 90.0, 45.0)},
)
TIMES = Times("cpu-gloo 12ab", "2.13", 2, 20, {"abc": GRAPH}, compute_stretch=1.25)
HERE = {"torch": "2.13", "world": 2}


def test_a_table_comes_back_as_it_was():
    again = of_text(to_text(TIMES))
    assert again == TIMES
    assert again.digest == TIMES.digest


def test_digest_follows_every_figure():
    slower = dataclasses.replace(GRAPH, nodes={**GRAPH.nodes, "relu": NodeTime("r", 2.0, 1.5)})
    others = [
        dataclasses.replace(TIMES, compute_stretch=1.5),
        dataclasses.replace(TIMES, launch_stretch=1.5),
        dataclasses.replace(TIMES, graphs={"abc": slower}),
        dataclasses.replace(TIMES, graphs={"abd": GRAPH}),
    ]
    assert len({TIMES.digest, *(t.digest for t in others)}) == 5


def test_a_file_of_this_job_is_read(tmp_path):
    path = tmp_path / "times.json"
    path.write_text(to_text(TIMES))
    assert read(path, **HERE) == TIMES


def row(content):
    return content["graphs"]["abc"]["nodes"]["mm"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda c: row(c).update(us=float("nan")), "must be a number"),
        (lambda c: row(c).update(us=-1.0), "of at least 0"),
        (lambda c: row(c).update(us="12"), "must be a number"),
        (lambda c: c["graphs"]["abc"]["nodes"].pop("relu"), "has 2 rows, not the 3"),
        (lambda c: row(c).pop("predicted_us"), "lacks the field"),
        (lambda c: c.update(compute_stretch=0.5), "of at least 1"),
        (lambda c: c.update(version=3), "must be 2"),
        (lambda c: c.update(torch="2.14"), "of another torch"),
        (lambda c: c.update(world=4), "of another number of ranks"),
    ],
)
def test_other_files_count_as_none(tmp_path, caplog, spoil, said):
    content = json.loads(to_text(TIMES))
    spoil(content)
    path = tmp_path / "times.json"
    path.write_text(json.dumps(content))
    assert read(path, **HERE) is None
    (line,) = caplog.messages
    assert said in line


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"version": 1}'])
def test_what_is_no_table_says_so(text):
    with pytest.raises(TimesError):
        of_text(text, "times.json")


def test_a_missing_file_is_none(tmp_path, caplog):
    assert read(tmp_path / "none.json", **HERE) is None
    assert len(caplog.messages) == 1
