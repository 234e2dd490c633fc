"""Broken schedules, and schedules applied wrongly: every one must be caught."""

import copy
import dataclasses
import itertools
import operator

import pytest
import torch
from programs import EVERY_KIND, GATHERS, RANKS, CoalescingCost, MergeAll, every_kind, gathers

from inductor_passes.errors import PassesError
from inductor_passes.pipeline import run_pass
from inductor_passes.schedule.extract import extract
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.testing import FixedCost, fake_group, trace

aten = torch.ops.aten


@pytest.fixture(scope="module", autouse=True)
def four_ranks():
    with fake_group(RANKS):
        yield


@pytest.fixture(scope="module")
def graph():
    return trace(every_kind, *EVERY_KIND)


def broken_numbers(problem, sound):
    """(what is wrong, solution) for schedules that break a rule of the problem."""

    def with_(**changes):
        return dataclasses.replace(sound, **changes)

    order, buckets = list(sound.order), sound.buckets
    for i, node in enumerate(problem.nodes):
        for d in (*node.deps, *([] if node.launch is None else [node.launch])):
            moved = [n for n in order if n != i]
            moved.insert(moved.index(d), i)
            yield f"{i} before {d}", with_(order=tuple(moved), buckets=())
        yield f"{i} lost", with_(order=tuple(n for n in order if n != i))
        yield f"{i} twice", with_(order=(*order, i))
        if node.kind != "launch":
            yield f"{i} in a bucket", with_(buckets=((*buckets[0], i), *buckets[1:]))
    for a, b in itertools.pairwise(buckets):
        yield "kinds mixed", with_(buckets=((*a, *b),))
        yield "shared member", with_(buckets=(a, (*b, a[0])))
    launches = [i for i, n in enumerate(problem.nodes) if n.kind == "launch"]
    plain = tuple(range(len(order)))
    for members in buckets:
        assert set(members) <= set(launches)
        yield "members apart", with_(order=plain, buckets=(members,))


def broken_graphs(buckets, graph):
    """(what is wrong, how to plant it) for graphs that a schedule was applied to wrongly."""
    for k, bucket in enumerate(buckets):
        coalesced = not isinstance(bucket.launch.args[0], torch.fx.Node)

        def swap_results(g, found, k=k):
            first, second = found[k].results[:2]
            users = [(u, first, second) for u in first.users]
            users += [(u, second, first) for u in second.users]
            for user, old, new in users:
                user.replace_input_with(old, new)

        def relabel(g, found, k=k):
            items = list(found[k].results)
            found[k] = dataclasses.replace(found[k], results=tuple(reversed(items)))

        def lose_member(g, found, k=k):
            found[k] = dataclasses.replace(
                found[k],
                members=found[k].members[1:],
                waits=found[k].waits[1:],
                results=found[k].results[1:],
            )

        def other_argument(g, found, k=k):
            launch = found[k].launch
            launch.args = (*launch.args[:-1], "another group")

        def other_order(g, found, k=k):
            launch = found[k].launch
            if coalesced_call(launch):
                launch.args = (list(reversed(launch.args[0])), *launch.args[1:])
            else:
                packed = launch.args[0]
                packed.args = (list(reversed(packed.args[0])), *packed.args[1:])

        def launch_late(g, found, k=k):
            found[k].landed.append(found[k].launch)

        def land_early(g, found, k=k):
            found[k].launch.prepend(found[k].landed)

        def stranger(g, found, k=k):
            with g.inserting_after(found[k].launch):
                g.call_function(aten.neg.default, (found[k].results[0],))

        def other_slot(g, found, k=k):
            slots = [n for n in found[k].made if n.target is operator.getitem]
            slots[0].args = (slots[0].args[0], slots[1].args[1])

        for plant in (
            swap_results,
            relabel,
            lose_member,
            other_argument,
            other_order,
            launch_late,
            land_early,
            stranger,
            other_slot,
        ):
            yield f"{plant.__name__} {k} {'coalesced' if coalesced else 'packed'}", plant
    for name in [n.name for n in graph.nodes if n.op == "call_function" and not n.users]:

        def lose(g, found, name=name):
            g.erase_node(next(n for n in g.nodes if n.name == name))

        yield f"lose {name}", lose

    def other_call(g, found):
        next(n for n in g.nodes if n.target is aten.mm.default).target = aten.matmul.default

    def other_input(g, found):
        product = next(n for n in g.nodes if n.target is aten.mm.default)
        product.args = tuple(reversed(product.args))

    yield "other call", other_call
    yield "other input", other_input


def coalesced_call(launch):
    return not isinstance(launch.args[0], torch.fx.Node)


def rejected(pass_, graph):
    with pytest.raises(PassesError):
        run_pass(pass_, copy.deepcopy(graph))


def test_two_hundred_broken_schedules_are_rejected(graph):
    cases = []
    for whole in (graph, trace(gathers, *GATHERS)):
        problem = extract(whole, FixedCost()).problem
        sound = MergeAll(FixedCost()).solve(problem, bucket=True)
        run_pass(MergeAll(FixedCost()), copy.deepcopy(whole))  # the sound one passes
        cases += [(whole, *case) for case in broken_numbers(problem, sound)]
    count = 0
    for whole, what, solution in cases:

        class Planted(ScheduleGraph):
            def solve(self, problem, *, solution=solution, **limits):
                return solution

            def _pays(self, *_):
                return True

        try:
            rejected(Planted(FixedCost()), whole)
        except BaseException as error:
            raise AssertionError(f"accepted: {what}") from error
        count += 1
    assert count >= 200, count


@pytest.mark.parametrize("cost", [FixedCost(), CoalescingCost()], ids=["packed", "coalesced"])
def test_schedules_applied_wrongly_are_rejected(graph, cost):
    probe = copy.deepcopy(graph)
    applied = []

    class Sound(MergeAll):
        def apply(self, *args):
            applied.extend(found := super().apply(*args))
            return found

    run_pass(Sound(cost), probe)
    count = 0
    for what, plant in broken_graphs(applied, probe):

        class Planted(MergeAll):
            def apply(self, graph, *args, plant=plant):
                found = super().apply(graph, *args)
                plant(graph, found)
                return found

        try:
            rejected(Planted(cost), graph)
        except BaseException as error:
            raise AssertionError(f"accepted: {what}") from error
        count += 1
    assert count >= 30, count
