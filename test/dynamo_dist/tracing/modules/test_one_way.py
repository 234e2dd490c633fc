"""A wrapper's ranks run its forward in one way, and one that leaves it later is told."""

import pytest

from dynamo_dist.errors import CannotFollowError
from dynamo_dist.tracing import eager_fallback
from inductor_passes.ranks.coordination import ALL, DIFFERENT, NOT_ALL


class Wrapper:
    pass


@pytest.fixture
def asked(monkeypatch):
    """What was asked, and what comes back: the last answer given."""
    questions, answers = [], []

    def vote(key, what, ranks, can, how=""):
        questions.append((key, tuple(ranks), can))
        return answers.pop() if answers else ALL if can else NOT_ALL

    monkeypatch.setattr(eager_fallback, "vote", vote)
    return questions, answers


def named(path=""):
    wrapper = Wrapper()
    eager_fallback.name(wrapper, path, [("weight", 0, 2)], (0, 1))
    return wrapper


def test_ranks_are_asked_once(asked):
    wrapper = named()
    assert eager_fallback.runs_in_graph(wrapper, True) and eager_fallback.runs_in_graph(
        wrapper, True
    )
    assert [(ranks, can) for _, ranks, can in asked[0]] == [((0, 1), True)]


def test_names_of_equal_wrappers_differ_by_their_number(asked):
    for wrapper in (named(), named()):
        eager_fallback.runs_in_graph(wrapper, True)
    (first, *_), (second, *_) = asked[0]
    assert first != second
    assert first.partition("/")[0] == second.partition("/")[0]


def test_layers_have_equal_names_in_any_order(asked):
    first, second = named("layers.0"), named("layers.1")
    keys = [eager_fallback.name(each, "", [], ()) for each in (first, second)]
    eager_fallback._wrappers.clear()
    eager_fallback._equal.clear()  # another process, that comes to the second layer first
    second, first = named("layers.1"), named("layers.0")
    assert keys == [eager_fallback.name(each, "", [], ()) for each in (first, second)]


def test_what_one_rank_cannot_none_does(asked):
    wrapper = named()
    asked[1].append(NOT_ALL)
    assert not eager_fallback.runs_in_graph(wrapper, True)
    assert not eager_fallback.runs_in_graph(wrapper, True) and len(asked[0]) == 1


def test_all_may_leave_it_later(asked):
    wrapper = named()
    eager_fallback.runs_in_graph(wrapper, True)
    assert not eager_fallback.runs_in_graph(wrapper, False)
    assert not eager_fallback.runs_in_graph(wrapper, True)


def test_one_rank_alone_may_not(asked):
    wrapper = named()
    eager_fallback.runs_in_graph(wrapper, True)
    asked[1].append(NOT_ALL)
    with pytest.raises(
        CannotFollowError, match="forward of Wrapper, which the job runs in one graph"
    ):
        eager_fallback.runs_in_graph(wrapper, False)


def test_none_is_whole_where_graphs_hold_other_wrappers(asked):
    wrappers = [named(), named()]
    asked[1].append(DIFFERENT)
    assert eager_fallback.run_in_graph(wrappers, []) == [False, False]
    # The second is given up at once: who waits for it does not wait long.
    assert [can for *_, can in asked[0]] == [True, False]


def test_a_wrapper_that_breaks_leaves_the_others_whole(asked):
    wrappers = [named(), named()]
    assert eager_fallback.run_in_graph(wrappers, wrappers[:1]) == [False, True]
