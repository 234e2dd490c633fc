"""What ranks make of each other's clocks, as text."""

from dynamo_dist.tuning.findings import Outcome, outcome, seen


def test_a_step_takes_as_long_as_on_the_slowest_rank_and_is_changed_where_it_is_on_any():
    same = {
        0: seen([10.0, 30.0, 12.0], changed=False),
        1: seen([11.0, 11.0, 11.0], changed=False),
    }
    assert Outcome.of_text(outcome(same)) == Outcome(12.0, False)
    other = {**same, 1: seen([11.0, 11.0, 20.0], changed=True)}
    assert Outcome.of_text(outcome(other)) == Outcome(20.0, True)
