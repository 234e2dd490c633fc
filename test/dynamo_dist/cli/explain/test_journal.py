"""The journal of an explained process: replaced, cut off, put together by rank."""

import dataclasses
import os

from dynamo_dist.cli.explained_process import Journal, read
from dynamo_dist.diagnostics import BreakRecord, Fact, RecompileRecord
from dynamo_dist.diagnostics.records import PlannedStep, PlanRecord

BREAK = BreakRecord("kind", "reason", "a.py:1: x", "why", "fix", hints=("one", "two"))
PLAN = PlanRecord(
    "f00", "exact", 3, 9.0, 4.0, 4.0, (PlannedStep("aten.mm", ("R", "S0"), ("R", "R")),)
)


def who(rank, world_size=2):
    return {
        "rank": rank,
        "world_size": world_size,
        "torch_version": "2.13.0",
        "plugin_version": "0.1.0",
    }


def test_what_is_written_is_read(tmp_path):
    journal = Journal(tmp_path)
    journal.process(**who(1))
    records = (BREAK, RecompileRecord("f", "a.py:1", "n == 3"), PLAN, Fact("loss", (1.0, 2.0)))
    for record in records:
        journal.record(record)
    (report,) = read(tmp_path)
    assert (report.rank, report.world_size, report.torch_version) == (1, 2, "2.13.0")
    assert (*report.breaks, *report.recompiles, *report.plans, *report.facts) == records


def test_a_later_line_replaces_an_earlier_one(tmp_path):
    journal = Journal(tmp_path)
    journal.record(BREAK)
    journal.record(dataclasses.replace(BREAK, count=2))
    journal.record(dataclasses.replace(BREAK, user_line="b.py:1: y"))
    (report,) = read(tmp_path)
    assert [item.count for item in report.breaks] == [2, 1]


def test_a_line_that_was_cut_off_is_not_read(tmp_path):
    Journal(tmp_path).record(BREAK)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text() + '{"kind": "breaks", "da')
    (report,) = read(tmp_path)
    assert report.breaks == (BREAK,)


def test_processes_of_one_rank_are_one_report(tmp_path):
    launcher, rank, other = (
        Journal(tmp_path / "a"),
        Journal(tmp_path / "b"),
        Journal(tmp_path / "c"),
    )
    for journal, place in ((launcher, (0, 1)), (rank, (0, 2)), (other, (1, 2))):
        journal._folder.mkdir()
        journal.process(**who(*place))
    launcher.record(BREAK)
    rank.record(dataclasses.replace(BREAK, user_line="b.py:1: y"))
    for folder in "abc":
        (path,) = (tmp_path / folder).iterdir()
        path.rename(tmp_path / f"{folder}.jsonl")
    first, second = read(tmp_path)
    assert (first.rank, first.world_size, len(first.breaks)) == (0, 2, 2)
    assert (second.rank, second.world_size, second.breaks) == (1, 2, ())


def test_worlds_of_several_sizes_are_one(tmp_path):
    for place in ((0, 2), (1, 2), (2, 4)):
        journal = Journal(tmp_path)
        journal.process(**who(*place))
        (tmp_path / f"{os.getpid()}.jsonl").rename(tmp_path / f"{place[0]}.jsonl")
    assert [(r.rank, r.world_size) for r in read(tmp_path)] == [(0, 4), (1, 4), (2, 4)]


def test_process_without_a_group_has_the_launchers_rank(tmp_path):
    Journal(tmp_path).record(BREAK)
    (report,) = read(tmp_path, (3, 4))
    assert (report.rank, report.world_size) == (3, 4)


def test_a_forked_child_has_a_file_of_its_own(tmp_path):
    journal = Journal(tmp_path)
    journal.record(BREAK)
    child = os.fork()
    if child == 0:
        journal.record(BREAK)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_has_no_report(tmp_path):
    assert read(tmp_path) == []
