"""The protocol in every job that is drawn, under every interleaving that is tried; and each of
its rules is needed.
"""

import collections
import importlib.util
import itertools
import random

import job_model as model
import pytest

from inductor_passes.errors import CannotFollowError, RanksDifferError
from inductor_passes.ranks import decided_traces, protocol
from inductor_passes.ranks.coordination import Await, ReadAll, Swap, Write, gather
from inductor_passes.ranks.decided_traces import DecidedTraces
from inductor_passes.ranks.protocol import OrderAgreement

Code, Call, Job = model.Code, model.Call, model.Job
SUM, GATHER = "all_reduce sum f32", "all_gather f32"


def drawn(seed, **options):
    return model.draw(random.Random(seed), **options)


def faults(seed, lonely=False):
    """What must never be, in one interleaving of one job: other bits, a stall, an error that is
    none.
    """
    job = drawn(seed, lonely=lonely)
    try:
        result = model.explore(job, f"order {seed}")
    except model.Wrong as wrong:
        return f"{seed}: {wrong}"
    alone = all(isinstance(error, CannotFollowError) for error in result.errors.values())
    if lonely and alone:
        return ""
    if result.errors or result.timeouts:
        return f"{seed}: {result.timeouts} waited to the deadline, {result.errors}"
    return ""


def test_ranks_that_match_in_eager_mode_run_without_a_word():
    found = [fault for seed in range(300) if (fault := faults(seed))]
    assert not found, found[0]


def test_half_of_the_jobs_are_reordered():
    results = [model.explore(drawn(seed), seed) for seed in range(100)]
    assert sum(result.reordered > 0 for result in results) > 40


def test_who_parts_alone_later_raises_and_nobody_gets_other_bits():
    found = [fault for seed in range(200) if (fault := faults(seed, lonely=True))]
    assert not found, found[0]
    raised = [bool(model.explore(drawn(s, lonely=True), s).errors) for s in range(100)]
    assert 3 < sum(raised) < 50


def inlined(seed, parting=None):
    return model.draw_inlined(random.Random(seed), parting=parting)


def inlined_faults(seed, parting=None):
    """As ``faults``, of a function that is evaluated by itself and inlined in a step."""
    try:
        result = model.explore(inlined(seed, parting), f"order {seed}")
    except model.Wrong as wrong:
        return f"{seed}: {wrong}"
    # What runs before a graph on a rank that has not compiled the step looks like other launches.
    told = RanksDifferError if parting == "eager" else CannotFollowError
    if parting and all(isinstance(error, told) for error in result.errors.values()):
        return ""
    if result.errors or result.timeouts:
        return f"{seed}: {result.timeouts} waited to the deadline, {result.errors}"
    return ""


@pytest.mark.parametrize("parting", [None, *model.WAYS])
def test_function_evaluated_alone_and_inlined_in_a_step(parting):
    found = [fault for seed in range(250) if (fault := inlined_faults(seed, parting))]
    assert not found, found[0]


MODEL = Code("m", ((GATHER, 0), ("all_gather f64", 0), (SUM, 0)))
STEP = Code("s", (*MODEL.launches, (SUM, 0)), inner=MODEL)
EVALUATION = Call(MODEL, callers=("evaluate:1", "main:1"))
WHOLE_STEP = Call(STEP, callers=("main:2",))


@pytest.mark.parametrize("first", [EVALUATION, WHOLE_STEP], ids=["evaluation", "step"])
def test_evaluation_and_step_keep_their_plans_in_any_order(first):
    then = WHOLE_STEP if first is EVALUATION else EVALUATION
    calls = (first, then, model.dataclasses.replace(first, holds=1))
    for seed in range(20):
        result = model.explore(Job(2, (((0, 1),),), (calls, calls)), seed)
        assert not result.errors and not result.timeouts
        assert len(result.decisions) == 6
        for _, _, decided in result.decisions:
            assert decided.how in ("agreed by all ranks", "as agreed before")
            assert decided.plan != model.PROGRAM and not decided.given_up


def test_no_plan_is_lost_where_all_ranks_run_whole_steps():
    kept = 0
    for seed in range(700):
        job = inlined(seed)
        calls = [call for step in job.steps for call in step]
        if any(call.python or call.apart or call.cuts for call in calls):
            continue
        if any("s:500" in call.callers for call in calls):
            continue  # by its name, the function could be the step
        hows = {decided.how for _, _, decided in model.explore(job, seed).decisions}
        assert hows <= {"agreed by all ranks", "as agreed before"}, (seed, hows)
        kept += len({call.code for call in calls}) == 2
    assert kept > 50


def part(job, rng):
    """The job, with one rank whose first call launches something else, or less."""
    rank = rng.randrange(job.ranks)
    calls = list(job.steps[rank])
    launches = list(calls[0].code.launches)
    at = rng.randrange(len(launches))
    if rng.random() < 0.5 or len(launches) == 1:  # a rank that launches nothing may be slow
        launches[at] = ("all_reduce max f32", launches[at][1])
    else:
        launches[at] = None
    calls[0] = Call(calls[0].code, (), launches=tuple(launches))
    steps = tuple(tuple(calls) if r == rank else s for r, s in enumerate(job.steps))
    return model.dataclasses.replace(job, steps=steps)


def whole(job):
    return model.dataclasses.replace(
        job,
        groups=(((*range(job.ranks),),),) * 3,
        steps=tuple(tuple(Call(call.code) for call in calls) for calls in job.steps),
    )


def test_ranks_that_do_not_match_are_told_which_launch():
    told = 0
    for seed in range(150):
        job = whole(drawn(seed))
        if not job.steps[0]:
            continue
        try:
            result = model.explore(part(job, random.Random(seed)), seed)
        except (
            model.Wrong
        ) as wrong:  # the last launch of a rank is missing: its peers wait for ever
            pytest.fail(f"{seed}: {wrong}")
        errors = [e for e in result.errors.values() if type(e) is RanksDifferError]
        told += bool(errors)
        for error in errors:
            assert "would launch different collectives on group" in str(error)
            assert "launch " in str(error) and "on rank" in str(error)
        assert errors or result.timeouts, seed
    assert told > 100


SAMPLED = 150


def systematic(job, preemptions=2):
    """Interleavings with so few switches from a rank that could go on: ``SAMPLED`` pairs of
    places or a few more.
    """
    lengths = []

    def run(switches):
        at, last = itertools.count(), [0]

        def choose(ready):
            step = next(at)
            if step in switches:
                last[0] = ready[switches[step] % len(ready)]
            elif last[0] not in ready:
                last[0] = ready[0]
            return last[0]

        result = model.Model(job).run(choose)
        lengths.append(next(at))
        return result

    yield run({})
    pairs = list(itertools.combinations(range(lengths[0]), preemptions))
    for places in pairs[:: max(1, len(pairs) // SAMPLED)]:
        for who in itertools.product(range(job.ranks), repeat=preemptions):
            yield run(dict(zip(places, who, strict=True)))


CODE = Code("f", ((GATHER, 0), (SUM, 0)), backward=(("reduce_scatter sum f32", 0),) * 2)


@pytest.mark.parametrize(
    "calls",
    [
        ((Call(CODE),), (Call(CODE, holds=1),)),
        ((Call(CODE),), (Call(CODE, (1,)),)),
        ((Call(CODE, (0,)),), (Call(CODE, (2,)),)),
        ((Call(CODE), Call(CODE, (1,))), (Call(CODE), Call(CODE, (1,)))),
    ],
    ids=["lengths", "a break", "breaks", "a break on both, later"],
)
def test_interleavings_of_two_ranks(calls):
    job = Job(2, (((0, 1),),), calls)
    count = 0
    for result in systematic(job):
        count += 1
        assert not result.errors and not result.timeouts
    assert count > 150


def test_operations_a_rank_and_graph_are_few():
    ranks = 64
    rows = tuple(tuple(range(i, i + 4)) for i in range(0, 64, 4))
    columns = tuple(tuple(range(i % 4 + 16 * (i // 4), 16 * (i // 4) + 16, 4)) for i in range(16))
    planes = tuple(tuple(range(i, 64, 16)) for i in range(16))
    code = Code("f", ((SUM, 0), (GATHER, 1), (SUM, 2)))
    job = Job(ranks, (rows, columns, planes), tuple((Call(code),) for _ in range(ranks)))
    result = model.explore(job, 0)
    assert not result.errors and not result.timeouts
    assert result.operations <= 15 * ranks, result.operations / ranks


def by_itself(rank, trace, offer):
    """What came before: each rank plans for what it holds, and ranks compare each graph's
    launches, by its number.
    """
    plan = offer.plan()
    rank.graphs = getattr(rank, "graphs", 0) + 1
    key = f"graph {rank.graphs}"
    ranks = range(rank.job.ranks)
    if (yield Swap(f"{key}/first", "", plan)) != plan:
        yield Write(((f"{key}/said", "they differ"),))
        raise RanksDifferError("their launches differ", "", "")
    yield Write(((f"{key}/here/{rank.number}", "1"),))
    if (yield ReadAll(tuple(f"{key}/here/{r}" for r in ranks))) is not None:
        yield Write(((f"{key}/said", "alike"),))
    came = yield Await(f"{key}/said")
    if came and (yield ReadAll((f"{key}/said",))) == ["they differ"]:
        raise RanksDifferError("their launches differ", "", "")
    return model.deciding.Decision(plan, "its own")


def test_ranks_that_plan_for_themselves_are_found_out():
    """Length buckets in turns, and a rank that compiles again alone; drawn jobs meet all ways to
    fail.
    """
    code = Code("f", ((GATHER, 0), ("all_gather f64", 0), (SUM, 0), (GATHER, 0)))
    one, other = Call(code), Call(code, holds=1)
    for calls in ((one, other, one), (one, other, other)), ((one, other), (one, one)):
        job = Job(2, (((0, 1),),), calls)
        with pytest.raises(model.Wrong, match="other bits"):
            model.explore(job, 0, by_itself)
        result = model.explore(job, 0)
        assert result.reordered and not result.errors and not result.timeouts
    ways = collections.Counter()
    for seed in range(300):
        try:
            result = model.explore(drawn(seed), seed, by_itself)
            ways["error" if result.errors else "late" if result.timeouts else "right"] += 1
        except model.Wrong as wrong:
            ways[str(wrong).partition(" on")[0].partition(":")[0]] += 1
    assert min(ways[way] for way in ("other bits", "error", "late")) > 10, ways


def nothing(*_args, **_options):
    return
    yield


def unseen(self, group):
    return
    yield


def own_groups_alone(self):
    votes = yield from gather(self.key, self.peers)
    return votes and {rank: model.json.loads(text)[1] for rank, text in votes.items()}


def does_not_wait(me, known):
    yield Write(((f"left/{known.trace.key}/{me}", "1"),))
    return ()


RULES = {
    "who ends a stream tells those that wait": (protocol, "_notify", nothing),
    "an ended stream stands on the boards": (OrderAgreement, "_record_end", nothing),
    "who passes by says so": (OrderAgreement, "announce", nothing),
    "what ended on a board is learnt": (OrderAgreement, "_read_ended", nothing),
    "an undecided stream of others is seen": (OrderAgreement, "_post", unseen),
    "all ranks that groups connect have to vote": (OrderAgreement, "_all_votes", own_groups_alone),
    "streams that may meet are known": (DecidedTraces, "meeting", lambda self, *_: []),
    "a plan is left by all or by none": (
        importlib.import_module("inductor_passes.ranks.decision"),
        "leave",
        does_not_wait,
    ),
    "who comes too late beside a plan does not run": (
        DecidedTraces,
        "may_be_running",
        lambda self, trace: None,
    ),
    "what is left to Python is said": (
        importlib.import_module("inductor_passes.ranks.decision"),
        "leave_to_python",
        nothing,
    ),
    "what is left to Python leaves its plans": (DecidedTraces, "reordered_in", lambda self, *_: []),
    "a function called from elsewhere is another call": (
        importlib.import_module("inductor_passes.ranks.collective_trace"),
        "_is_called_elsewhere",
        lambda *_: False,
    ),
    "who is behind Python says so": (DecidedTraces, "is_behind_python", lambda self, trace: False),
    "a later graph takes what was settled": (DecidedTraces, "get", lambda self, *_: None),
    "backward graphs of a function that is cut do not wait": (
        DecidedTraces,
        "record_cut",
        lambda self, root: None,
    ),
    "sizes of other rows are not compared": (
        OrderAgreement,
        "_theirs",
        lambda self, group, number, put: put.trace.on(number),
    ),
    "a plan is followed or refused": (model.Offer, "can_follow", lambda self, plan: True),
}


def of_these_callers(self, trace, same):
    found = [*self.meeting(trace), *([] if same is None else [same])]
    return [known for known in found if known.is_reordered]


def in_place_alone(self, root, callers):
    return [
        known
        for known in self._known.values()
        if known.is_reordered and known.trace.may_be_in_place_of(root, callers)
    ]


def forgets_first(self, key, *of, add=DecidedTraces.add, **how):
    add(self, key, *of, **how)
    self._known[key].first = self._known[key].trace


# Each with the way in which a rank parts from a step, where the rule is needed.
RULES_OF_CALLS = {
    "plans of other calls are left where graphs differ": (
        "python",
        (DecidedTraces, "reordered", of_these_callers),
    ),
    "nobody comes too late beside a plan of another call": (
        "eager",
        (DecidedTraces, "reordered", of_these_callers),
    ),
    "a graph that is called from a step anew leaves plans": (
        "apart",
        (DecidedTraces, "conflicts_with_callers", lambda *_: False),
    ),
    "what Python calls in a step leaves its plans": (
        "python",
        (DecidedTraces, "reordered_in", in_place_alone),
    ),
    "callers of all compiles count": (
        "apart",
        (decided_traces, "_all_callers", lambda _, last: last),
    ),
    "one trace seen from two places is so by its first compile": (
        None,
        (DecidedTraces, "add", forgets_first),
    ),
    "what runs by a graph of another call is not compared": (
        "apart",
        (DecidedTraces, "has_agreed_part", lambda self, trace: False),
    ),
}


@pytest.mark.parametrize("rule", RULES_OF_CALLS)
def test_no_rule_of_calls_can_be_left_out(rule, monkeypatch):
    parting, without = RULES_OF_CALLS[rule]
    monkeypatch.setattr(*without)
    if any(inlined_faults(seed, parting) for seed in range(2500)):
        return
    pytest.fail(f"nothing is lost without the rule that {rule}")


#: Jobs before which there is none that needs the rule.
FIRST = {"sizes of other rows are not compared": 600}


def errors_beside_python():
    one, other = Code("f", ((SUM, 0), (GATHER, 0))), Code("g", ((GATHER, 0), (SUM, 0)))
    left = (Call(one, python=True, awaits=False), Call(other))
    job = Job(2, (((0, 1),),), ((Call(one), Call(other)), left))
    return sum(bool(model.explore(job, seed).errors) for seed in range(200))


def test_what_python_launches_and_awaits_later_is_not_compared(monkeypatch):
    assert not errors_beside_python()
    monkeypatch.setattr(DecidedTraces, "is_left_to_python", lambda self, trace: False)
    assert errors_beside_python()


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_can_be_left_out(rule, monkeypatch):
    monkeypatch.setattr(*RULES[rule])
    first = FIRST.get(rule, 0)
    for seed in range(first, first + 2500):
        for lonely in (False, True):
            try:
                if faults(seed, lonely):
                    return
            except Exception:  # what the protocol itself believes impossible
                return
    pytest.fail(f"nothing is lost without the rule that {rule}")
