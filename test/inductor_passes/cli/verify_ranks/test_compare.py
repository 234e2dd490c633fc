from inductor_passes.cli.verify_ranks.command import chosen_ranks, compare
from inductor_passes.cli.verify_ranks.compare import PeerLaunch, deadlock, differences
from inductor_passes.cli.verify_ranks.trace import Traced

PAIR, OTHER, ALL = (0, 1), (2, 3), (0, 1, 2, 3)


def launch(ranks, payload=64, operation="all_gather", reduce_op=None):
    return PeerLaunch(operation, ranks, payload, "float32", reduce_op)


def test_equal_sequences_of_each_group_are_equal():
    mine = [launch(PAIR), launch(ALL)]
    theirs = [launch(OTHER, 128), launch(ALL)]
    assert differences("g", {0: mine, 1: mine, 2: theirs, 3: theirs}) == []


def test_the_first_differing_launch_is_named():
    found = differences("g", {0: [launch(ALL), launch(ALL, 8)], 1: [launch(ALL)] * 2})
    assert [str(d) for d in found] == [
        "Graph g, launch 1 of the group of ranks 0, 1, 2, 3: rank 0: all_gather of 8 bytes, "
        "float32; rank 1: all_gather of 64 bytes, float32"
    ]


def test_a_rank_that_launches_less_is_named():
    (found,) = differences("g", {0: [launch(PAIR)], 1: []})
    assert "rank 1: no further launch" in str(found)


def test_an_order_that_suits_nobody_is_a_deadlock():
    cross = {0: [launch(PAIR), launch(ALL)], 1: [launch(ALL), launch(PAIR)]}
    assert differences("g", cross) == []  # each group alone is in order
    assert len(deadlock(cross)) == 3
    assert deadlock({0: cross[0], 1: cross[0]}) == []


def test_ranks_that_stand_for_all():
    assert chosen_ranks(8, "4x2", "") == list(range(8))
    assert chosen_ranks(64, "", "") == [0, 1, 32, 62, 63]
    many = chosen_ranks(256, "32x8", "")
    assert len(many) == 5 * 8 and many[0] == 0 and many[-1] == 255
    assert chosen_ranks(64, "", "3,1") == [1, 3]


def test_bad_shapes_are_refused():
    for arguments, words in (
        ((8, "4x4", ""), "16 ranks"),
        ((8, "", "9"), "0 to 7"),
        ((0, "", ""), "1"),
    ):
        try:
            chosen_ranks(*arguments)
        except ValueError as error:
            assert words in str(error)
        else:
            raise AssertionError(arguments)


def test_a_script_without_graphs_or_with_an_error_is_not_verified():
    assert not compare([Traced(0)], 1)["ok"]
    result = compare([Traced(0, {"g": [launch(PAIR)]}, "ValueError: no")], 2)
    assert not result["ok"] and result["errors"] == ["Rank 0: ValueError: no"]
