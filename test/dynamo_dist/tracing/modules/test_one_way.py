"""A wrapper's ranks run its forward in one way, and one that leaves it later is told."""

import pytest

from dynamo_dist.errors import CannotFollowError
from dynamo_dist.tracing import wrapper_agreement


class Wrapper:
    pass


@pytest.fixture
def asked(monkeypatch):
    """What was asked, and what comes back: the last answer given."""
    questions, answers = [], []

    def all_can(what, ranks, can, deadline_s):
        questions.append((what, tuple(ranks), can))
        return answers.pop() if answers else can

    def vote(what, ranks, can, deadline_s, how=""):
        answer = all_can(what, ranks, can, deadline_s)
        return (
            answer
            if isinstance(answer, str)
            else wrapper_agreement.ALL
            if answer
            else wrapper_agreement.NOT_ALL
        )

    monkeypatch.setattr(wrapper_agreement, "all_can", all_can)
    monkeypatch.setattr(wrapper_agreement, "vote", vote)
    return questions, answers


def named():
    wrapper = Wrapper()
    wrapper_agreement.name(wrapper, [("weight", 0, 2)], (0, 1))
    return wrapper


def test_ranks_are_asked_once(asked):
    wrapper = named()
    assert wrapper_agreement.is_whole(wrapper, True) and wrapper_agreement.is_whole(wrapper, True)
    assert [(ranks, can) for _, ranks, can in asked[0]] == [((0, 1), True)]


def test_names_of_equal_wrappers_differ_by_their_number(asked):
    for wrapper in (named(), named()):
        wrapper_agreement.is_whole(wrapper, True)
    (first, *_), (second, *_) = asked[0]
    assert first != second
    assert first.partition("/")[0] == second.partition("/")[0]


def test_what_one_rank_cannot_none_does(asked):
    wrapper = named()
    asked[1].append(False)
    assert not wrapper_agreement.is_whole(wrapper, True)
    assert not wrapper_agreement.is_whole(wrapper, True) and len(asked[0]) == 1


def test_all_may_leave_it_later(asked):
    wrapper = named()
    wrapper_agreement.is_whole(wrapper, True)
    assert not wrapper_agreement.is_whole(wrapper, False)
    assert not wrapper_agreement.is_whole(wrapper, True)


def test_one_rank_alone_may_not(asked):
    wrapper = named()
    wrapper_agreement.is_whole(wrapper, True)
    asked[1].append(False)
    with pytest.raises(
        CannotFollowError, match="forward of Wrapper, which the job runs in one graph"
    ):
        wrapper_agreement.is_whole(wrapper, False)


def test_none_is_whole_where_graphs_hold_other_wrappers(asked):
    wrappers = [named(), named()]
    asked[1].append(wrapper_agreement.DIFFERENT)
    assert wrapper_agreement.are_whole(wrappers, []) == [False, False]
    # The second is given up at once: who waits for it does not wait long.
    assert [can for *_, can in asked[0]] == [True, False]


def test_a_wrapper_that_breaks_leaves_the_others_whole(asked):
    wrappers = [named(), named()]
    assert wrapper_agreement.are_whole(wrappers, wrappers[:1]) == [False, True]
