"""Ranks that settle on cutting joint graphs: both halves follow, and what gives one up gives up
all three.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from inductor_passes.errors import CannotFollowError
from inductor_passes.ranks import coordination, decision
from inductor_passes.ranks.collective_trace import PROGRAM, CollectiveTrace, Group, Launch
from inductor_passes.ranks.decision import Orders
from inductor_passes.ranks.protocol import CachedOffer
from inductor_passes.torch_compat import c10d as c10d_compat

SUM = "all_reduce sum float32"
CUT = '[[["0: part 1 of 2 along dimension 0"], "all_reduce sum float32"]]'
GROUP = Group("0", (0, 1))


def trace(*paths, **how):
    launches = tuple(Launch(SUM, 0, tuple(path.split())) for path in paths)
    return CollectiveTrace((GROUP,), launches, root="f", graph="0/0", **how)


JOINT = trace("f:1", "f:2", "f:2", "f:1", is_joint=True)
FORWARD = trace("f:1", "f:1", "f:2", "f:2", joint=JOINT.key)
BACKWARD = dataclasses.replace(FORWARD, backward=True)


@pytest.fixture
def ranks(monkeypatch):
    """Decides on each rank's streams in turn, all ranks at once: (stream, plan), ... of rank 0
    and of rank 1.
    """
    decision.forget()
    monkeypatch.setenv(coordination.SECONDS, "5")
    monkeypatch.setattr(c10d_compat, "real_groups", lambda: {"0": (0, 1)})
    store = dist.HashStore()
    jobs = [Orders(store, rank, None) for rank in range(2)]

    def decide(*of_ranks):
        def run(job, asked):
            return [job.decide(each, CachedOffer(plan)).plan for each, plan in asked]

        with ThreadPoolExecutor(2) as pool:
            found = [pool.submit(run, *each) for each in zip(jobs, of_ranks, strict=True)]
        return [each.exception() or each.result() for each in found]

    return decide


def test_all_ranks_cut_or_none(ranks):
    asked = [(JOINT, CUT), (FORWARD, PROGRAM), (BACKWARD, PROGRAM)]
    assert ranks(asked, asked) == [[CUT, PROGRAM, PROGRAM]] * 2


def test_later_break_on_all_ranks_leaves_the_joint_graph_unsplit(ranks):
    asked = [(JOINT, CUT), (FORWARD, PROGRAM)]
    assert ranks(asked, asked) == [[CUT, PROGRAM]] * 2
    piece = [(trace("f:1", partial=True), PROGRAM)]
    assert ranks(piece, piece) == [[PROGRAM]] * 2
    again = [(JOINT, CUT)]
    assert ranks(again, again) == [[PROGRAM]] * 2


def test_a_break_that_one_rank_alone_meets_later_is_told(ranks, monkeypatch):
    monkeypatch.setenv(coordination.SECONDS, "0.2")
    asked = [(JOINT, CUT), (FORWARD, PROGRAM)]
    ranks(asked, asked)
    failed, _ = ranks([(trace("f:1", partial=True), PROGRAM)], [])
    assert isinstance(failed, CannotFollowError)


@pytest.mark.parametrize(
    "other", [trace("f:1", "f:2"), trace("f:1", "f:1", is_joint=True, partial=True)]
)
def test_training_beside_evaluation_is_not_split(ranks, other):
    mine, theirs = ranks([(JOINT, CUT)], [(other, PROGRAM)])
    assert mine == [PROGRAM] and theirs == [PROGRAM]


def test_a_half_that_another_rank_does_not_launch_is_an_error(ranks):
    ours, theirs = (
        [(JOINT, CUT), (FORWARD, PROGRAM)],
        [(JOINT, CUT), (trace("f:1", partial=True), PROGRAM)],
    )
    found = ranks(ours, theirs)
    assert isinstance(found[0], CannotFollowError) and "into parts" in str(found[0])


def test_a_stream_says_what_it_is_a_half_of():
    assert CollectiveTrace.from_json(FORWARD.to_json()) == FORWARD
    assert CollectiveTrace.from_json(JOINT.to_json()) == JOINT
    assert FORWARD.key != dataclasses.replace(FORWARD, joint="").key
