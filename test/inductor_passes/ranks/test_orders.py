"""What a process does where ranks cannot settle, what its code carries, and when a plan no
longer holds.
"""

import dataclasses
import json
import time
import zlib
from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from inductor_passes.errors import CannotFollowError, OptionError, RanksDifferError
from inductor_passes.inductor.hooks import Attachment
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import cost_model, run_passes
from inductor_passes.ranks import carried, coordination
from inductor_passes.ranks import decision as orders
from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    CollectiveTrace,
    Frame,
    Group,
    Launch,
    LaunchPlan,
    frame_of_graph,
    is_same,
    may_meet,
    number_launches,
    place_of,
)
from inductor_passes.ranks.coordination import SECONDS, Await, Coordination, Swap, deadline_s
from inductor_passes.ranks.decision import Decision, Orders
from inductor_passes.ranks.protocol import CachedOffer, GraphOffer
from inductor_passes.testing import dump, fake_group, trace
from inductor_passes.torch_compat import c10d as c10d_compat
from inductor_passes.torch_compat import caches, dynamo

c10d = torch.ops._c10d_functional
SUM = "all_reduce sum float32"


def stream(*paths, partial=False, what=SUM, ranks=(0, 1)):
    group = Group("0", ranks)
    launches = tuple(Launch(what, 0, tuple(path.split())) for path in paths)
    return CollectiveTrace((group,), launches, partial=partial, root="f", graph="0/0:forward")


@pytest.fixture
def job(monkeypatch):
    orders.forget()
    monkeypatch.setattr(c10d_compat, "real_groups", lambda: {"0": (0, 1)})
    return lambda store: Orders(store, 0, None)


class Failing:
    def compare_set(self, *_):
        raise RuntimeError("connection reset by peer")


class Damaged(Failing):
    def __init__(self, held):
        self.held = held

    def compare_set(self, key, old, new):
        return self.held if "proposal/" in key else b""


def test_order_without_a_store_is_the_programs_and_warns_once(job, caplog):
    for _ in range(2):
        decision = job(None).decide(stream("f:1", "f:2"), CachedOffer("[[[1], 0]]"))
        assert decision.plan == PROGRAM
    assert caplog.text.count("ranks cannot agree on an order") == 1


def test_with_no_time_to_settle_neither(job, caplog, monkeypatch):
    monkeypatch.setenv(SECONDS, "0")
    decision = job(dist.HashStore()).decide(stream("f:1"), CachedOffer("[[[1], 0]]"))
    assert decision.plan == PROGRAM and "INDUCTOR_PASSES_AGREEMENT_SECONDS is 0" in caplog.text


def test_a_store_that_fails_costs_a_warning(job, caplog):
    decision = job(Failing()).decide(stream("f:1"), CachedOffer("[[[1], 0]]"))
    assert decision.plan == PROGRAM
    assert "connection reset by peer" in caplog.text and "0/0:forward" in caplog.text


@pytest.mark.parametrize("held", [b"", b"{}", b"!", b"0" * 500])
def test_what_cannot_be_read_in_the_store_counts_as_a_failure(job, caplog, held):
    decision = job(Damaged(held)).decide(stream("f:1"), CachedOffer("[[[1], 0]]"))
    assert decision.plan == PROGRAM and "job's store failed" in caplog.text


def test_a_rank_that_does_not_come_is_named(job, caplog, monkeypatch):
    monkeypatch.setenv(SECONDS, "0.1")
    decision = job(dist.HashStore()).decide(stream("f:1"), CachedOffer("[[[1], 0]]"))
    assert decision.plan == PROGRAM and "rank 1 had not compiled graph 0/0:forward" in caplog.text


def test_the_time_is_read_from_the_environment():
    assert deadline_s({}) == 30 and deadline_s({SECONDS: "0"}) == 0
    for bad in ("soon", "-1", "inf", "nan"):
        with pytest.raises(OptionError, match=SECONDS):
            deadline_s({SECONDS: bad})


def test_a_plan_given_up_or_another_job_ends_what_holds(job, monkeypatch):
    one = job(None)
    monkeypatch.setattr(c10d_compat, "reads_default_group", lambda: lambda: None)
    holds = one.still_holds()
    assert holds()
    one._given_up += 1
    assert not holds() and one.still_holds()()
    monkeypatch.setattr(c10d_compat, "reads_default_group", lambda: lambda: object())
    assert not one.still_holds()()


def test_no_group_between_processes_settles_nothing():
    orders.forget()
    assert orders.current() is None
    with fake_group(4):
        assert orders.current() is None


def test_code_carries_its_stream_and_plan():
    before = carried.Counts()
    one = stream("f:1 g:2", "f:3")
    carried.count(one, "[[[1, 0], 0]]")
    (found,) = before.since()
    assert (found.trace, found.plan) == (one, "[[[1, 0], 0]]")
    assert carried.Counts().since() == []


@pytest.mark.parametrize(
    "data",
    [
        b"not compressed",
        *(zlib.compress(json.dumps(d).encode()) for d in ([], [9, {}, ""], {"a": 1})),
    ],
)
def test_damaged_code_counts_as_without(data, caplog):
    before = carried.Counts()
    caches.counters()[carried.PREFIX + urlsafe_b64encode(data).decode()] += 1
    assert before.since() == [] and "cannot be read" in caplog.text


def test_deep_nesting_is_damage_too(caplog):
    before = carried.Counts()
    deep = zlib.compress(b"[" * 100_000 + b"]" * 100_000)
    caches.counters()[carried.PREFIX + urlsafe_b64encode(deep).decode()] += 1
    assert before.since() == []


def test_trace_key_has_lines_and_collectives_not_sizes_or_groups():
    one = stream("f:1", "f:2")
    other = CollectiveTrace(
        (Group("7", (2, 3)),),
        tuple(Launch(SUM, 0, launch.path, 64, "line") for launch in one.launches),
        root="f",
        graph="3/1:forward",
    )
    assert one.key == other.key
    assert one.key != stream("f:1", "f:3").key and one.key != stream("f:1").key
    assert CollectiveTrace.from_json(json.loads(json.dumps(one.to_json()))) == one
    for bad in (None, [], {}, {**one.to_json(), "version": 0}, {**one.to_json(), "launches": [1]}):
        with pytest.raises(ValueError, match="no trace"):
            CollectiveTrace.from_json(bad)


def test_which_streams_ranks_may_run_for_one_another():
    whole = stream("f:1 g:5", "f:2")
    assert may_meet(whole, stream("f:1 g:5", partial=True))
    assert may_meet(whole, stream("g:5"))  # compiled from further inside
    assert not may_meet(whole, stream("f:1 g:5"))  # two whole calls of one function
    assert not may_meet(whole, stream("h:9", partial=True))
    assert is_same(whole, stream("g:5", "f:2")) and not is_same(whole, stream("g:5"))


def test_a_graph_is_left_as_it_is_until_it_is_carried_out():
    def program(x, w):
        a = c10d.wait_tensor(c10d.all_reduce(x * 2, "sum", "0"))
        b = c10d.wait_tensor(c10d.all_reduce(x + 1, "sum", "0"))
        return a @ w, b @ w

    graph = trace(program, [4, 8], [8, 8], world_size=2)
    found = number_launches(
        graph, lambda name: (0, 1), Frame(), phase="inference", graph_id="0/0:inference"
    )
    before = dump(graph)
    with fake_group(2):
        offer = GraphOffer(
            graph, found, lambda g, plan, keep: run_passes(g, ranks_differ=keep, follow=plan)
        )
        plan = offer.plan()
        assert plan != PROGRAM and dump(graph) == before
        assert offer.can_follow(plan) and offer.can_follow(PROGRAM)
        assert not offer.can_follow('[[[5], "all_reduce sum float32"]]')
        assert not offer.can_follow("not a plan")
        offer.carry_out(PROGRAM)
        assert dump(graph).count("all_reduce(") == 2
        record = offer.carry_out(plan)
        assert dump(graph).count("all_reduce(") == 1
        # What is settled by ranks that are alike is what each of them would do alone.
        alone = run_passes(trace(program, [4, 8], [8, 8]))
        assert record.after.makespan_us == alone.after.makespan_us


BROKEN = """
def f(x, loud=False):
    y = fc.all_reduce(x.sin(), "sum", group)
    if loud:
        print(end="")
    return launch(y.cos())
def launch(y):
    return fc.all_reduce(y, "sum", group)
"""


def streams(file, **arguments):
    """What a rank compiles of ``BROKEN``, whose source it has in a file of this name."""
    from torch._dynamo.backends.common import aot_autograd

    found = []

    def compiler(module, _inputs):
        ranks = {"0": (0, 1)}.get
        options = {"phase": "inference", "graph_id": ""}
        found.append(number_launches(module.graph, ranks, frame_of_graph(), **options))
        return module.forward

    with fake_group(2):
        names = {"fc": torch.distributed._functional_collectives, "group": dist.group.WORLD}
        exec(compile(BROKEN, file, "exec"), names)
        torch.compiler.reset()
        torch.compile(names["f"], backend=aot_autograd(fw_compiler=compiler))(
            torch.ones(4), **arguments
        )
    return found


def test_trace_key_ignores_file_names_and_breaks():
    (whole,) = streams("one.py")
    first, second = streams("other.py", loud=True)
    paths = [[launch.path for launch in each.launches] for each in (whole, first, second)]
    assert paths[0] == paths[1] + paths[2]
    assert [path[:-1] for path in paths[0]] == [("f:3",), ("f:6", "launch:8")]
    assert whole.launches[0].line == "one.py:3"
    assert whole.root == "f (one.py:2-6)" and first.root == second.root == "f (other.py:2-6)"
    assert (whole.partial, first.partial, second.partial) == (False, True, True)
    assert may_meet(whole, first) and may_meet(whole, second) and not may_meet(first, second)
    assert streams("other.py")[0].key == whole.key


def test_functions_of_one_name_in_two_files_are_two():
    (whole,) = streams("one.py")
    assert whole.is_of("f (one.py:2-6)") and whole.is_of("launch (one.py:7-8)")
    for other in ("f (two.py:2-6)", "f (one.py:7-8)", "launch (two.py:1-99)", "", "f"):
        assert not whole.is_of(other), other
    assert CollectiveTrace.from_json(whole.to_json()).is_of("launch (one.py:7-8)")


def test_what_is_called_from_elsewhere_is_another_call():
    (whole,) = streams("one.py")
    inner = "launch (one.py:7-8)"
    assert whole.may_be_in_place_of(inner, {"main:3", "f:6"})
    assert not whole.may_be_in_place_of(inner, {"main:3", "f:5"})
    assert whole.may_be_in_place_of("f (one.py:2-6)", set())


def test_callers_are_the_programs_and_not_the_compilers():
    found = []

    def backend(module, _inputs):
        found.extend(dynamo.callers())
        return module.forward

    def caller():
        return torch.compile(torch.sin, backend=backend)(torch.ones(2))

    caller()
    names = {each.rpartition(":")[0] for each in found}
    assert f"caller:{caller.__code__.co_firstlineno + 1}" in found
    assert not names & {"backend", "step", "transform_code_object"}


def test_a_module_of_torch_is_known_by_its_own_function():
    roots = []

    def backend(module, _inputs):
        roots.append(frame_of_graph().root)
        return module.forward

    for model in (torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)):
        torch.compile(model, backend=backend)(torch.ones(2))
    assert all(root.startswith("forward (") for root in roots) and len(set(roots)) == 2


@pytest.mark.parametrize(
    ("mine", "theirs", "alike"),
    [
        (("loop:2 call:9", "loop:3 call:9"), ("call:9",), True),  # a container, and one layer of it
        (("loop:2 call:9", "loop:3 call:9"), ("loop:3 call:9",), False),
        ((), ("loop:3 call:9",), True),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_one_function_in_one_place_launches_the_same(mine, theirs, alike, backward, monkeypatch):
    monkeypatch.setattr(c10d_compat, "real_groups", lambda: {"0": (0, 1)})
    monkeypatch.setenv(SECONDS, "2" if mine else "0.2")
    store, root = dist.HashStore(), "call (layers.py:1-20)"

    def decide(rank, paths):
        own = dataclasses.replace(stream(*paths), root=root, backward=backward)
        try:
            plan = json.dumps([[list(range(len(paths))), 0]])
            return Orders(store, rank, None).decide(own, CachedOffer(plan)).plan
        except RanksDifferError as error:
            return type(error)

    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(decide, *each) for each in enumerate((mine, theirs)) if each[1]]
        said = {job.result() for job in jobs}
    assert said == ({PROGRAM} if alike else {RanksDifferError})


@pytest.mark.parametrize("seconds", ["0.1", "0"])
def test_function_that_gathers_again_has_no_eager_fallback(seconds, job, monkeypatch):
    monkeypatch.setattr(dynamo, "frame_number", lambda: 7)
    own = job(dist.HashStore())
    monkeypatch.setenv(SECONDS, seconds)
    for what, backward, unlike in (
        ("all_gather float32", False, False),
        (SUM, True, False),
        ("all_gather float32", True, True),
    ):
        graph = dataclasses.replace(stream("f:1", what=what), backward=backward)
        assert own.decide(graph, CachedOffer(PROGRAM)).plan == PROGRAM
        assert own.is_unlike_python(7) is unlike


def test_eager_fallback_on_one_rank_cannot_keep_the_order(monkeypatch):
    def function():
        return 1

    def other():
        return 2

    monkeypatch.setattr(c10d_compat, "real_groups", lambda: {"0": (0, 1)})
    orders.forget()
    store = dist.HashStore()
    ranks = [Orders(store, rank, None) for rank in range(2)]
    line = function.__code__.co_firstlineno + 1
    planned = dataclasses.replace(stream(f"function:{line}", "step:2"), root="step (train.py:1-9)")
    with ThreadPoolExecutor(2) as pool:
        decisions = list(
            pool.map(lambda rank: rank.decide(planned, CachedOffer("[[[1], 0], [[0], 0]]")), ranks)
        )
    assert {decision.plan for decision in decisions} == {"[[[1], 0], [[0], 0]]"}
    monkeypatch.setenv(SECONDS, "0.2")
    holds = [rank.still_holds() for rank in ranks]
    ranks[0].leave_to_python(other.__code__)
    with pytest.raises(CannotFollowError, match=rf"function \(.*:{line - 1}-{line}\) in Python"):
        ranks[0].leave_to_python(function.__code__)
    ranks[1].leave_to_python(function.__code__)  # now both have left it
    ranks[0].leave_to_python(function.__code__)
    assert not any(check() for check in holds)
    for rank in ranks:
        assert rank.decide(planned, CachedOffer("[[[1], 0], [[0], 0]]")).plan == PROGRAM


def test_cached_code_serves_only_where_its_lines_are():
    def place(lines):
        places = []

        def backend(module, _inputs):
            places.append(place_of(module.graph))
            return module.forward

        names = {"torch": torch}
        exec(compile("\n" * lines + "def f(x):\n    return torch.sin(x)\n", "a.py", "exec"), names)
        torch.compile(names["f"], backend=backend)(torch.ones(2))
        return places

    assert place(0) == place(0) != place(1)
    keys = {Attachment(PassOptions(), place=each).uuid("after") for each in ("one", "two", "two")}
    assert len(keys) == 2


def test_graphs_with_ragged_shards_agree_on_a_plan(monkeypatch):
    offered = []

    class Job:
        def decide(self, stream, offer):
            offered.append(LaunchPlan.of(offer.plan()).launches)
            return Decision(PROGRAM, "")

    def program(x):
        shards = [torch.nn.functional.pad(x * i, [0, 0, 0, 1]) for i in range(3)]
        return [c10d.wait_tensor(c10d.all_gather_into_tensor(each, 2, "0")) for each in shards]

    monkeypatch.setattr(orders, "current", Job)
    monkeypatch.setattr(orders, "ranks_of", lambda name: (0, 1))
    with fake_group(2):
        attachment, graph = Attachment(PassOptions(), uneven=True), trace(program, [4, 8])
        attachment._run(graph, "forward", "g", cost_model(graph, attachment.options))
    assert [len(planned.members) for planned in offered[0]] == [3]
    assert dump(graph).count("all_gather_into_tensor(") == 3  # the job has kept the program's order


def test_graphs_that_read_other_types_agree_apart(monkeypatch):
    """A function in float32, then under autocast: what it gathers is the same, and not what
    passes make of it.
    """
    asked = []

    class Job:
        def decide(self, stream, offer):
            asked.append(stream)
            return Decision(PROGRAM, "")

    monkeypatch.setattr(orders, "current", Job)
    monkeypatch.setattr(orders, "ranks_of", lambda name: (0, 1))

    def program(x):
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))

    def narrow(x):
        return torch.ops.prims.convert_element_type(program(x), torch.bfloat16).sin()

    for each in (program, narrow, narrow):
        with fake_group(2):
            attachment, graph = Attachment(PassOptions()), trace(each, [4, 8])
            attachment._run(graph, "forward", "g", cost_model(graph, attachment.options))
    wide, under_autocast, again = asked
    assert wide.launches == under_autocast.launches
    assert wide.key != under_autocast.key == again.key


def test_equal_code_of_two_files_is_left_to_python_apart(job):
    one, other = (
        compile("def f(x): return x", file, "exec").co_consts[0] for file in ("a.py", "b.py")
    )
    own = job(dist.HashStore())
    own.leave_to_python(one)
    assert one == other and own.is_left_to_python(one) and not own.is_left_to_python(other)


def test_a_store_that_fails_for_a_moment_is_asked_again(monkeypatch):
    class Moody:
        def __init__(self, store):
            self.store, self.asked = store, 0

        def compare_set(self, *of):
            self.asked += 1
            if self.asked < 3:
                raise RuntimeError("connection reset by peer")
            return self.store.compare_set(*of)

    store = Moody(dist.HashStore())

    def steps():
        return (yield Swap("key", "", "new"))

    assert Coordination(store).run(steps(), 1.0) == "new"
    assert store.asked == 3


def test_wait_lasts_where_the_store_times_out_too_early(monkeypatch):
    class Rounding:
        def wait(self, keys, timeout):
            time.sleep(max(0.0, timeout.total_seconds() - 0.002))
            raise RuntimeError("timed out")

        def check(self, keys):
            return False

    def steps():
        return (yield Await("key"))

    monkeypatch.setattr(coordination, "SAY_S", 0.1)
    start = time.monotonic()
    assert Coordination(Rounding()).run(steps(), 1.5) is False
    assert time.monotonic() - start > 1.3  # longer than one slice and the tries after failures


def test_wait_survives_a_momentary_failure_of_the_store():
    class Moody:
        failures = 2

        def wait(self, keys, timeout):
            if self.failures:
                self.failures -= 1
                raise RuntimeError("connection reset by peer")

    def steps():
        return (yield Await("key"))

    assert Coordination(Moody()).run(steps(), 5.0) is True
    store = dist.HashStore()
    start = time.monotonic()
    assert Coordination(store).run(steps(), 0.2) is False
    assert time.monotonic() - start < 1.0
