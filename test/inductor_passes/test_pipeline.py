import contextlib
import gc

import pytest
import torch

import inductor_passes as ip
from inductor_passes import registry
from inductor_passes.errors import InvariantError, OptionError, PassFailedError
from inductor_passes.graph_pass import GraphPass, Numerics, PassStats
from inductor_passes.inductor.hooks import Attachment, attach
from inductor_passes.pipeline import run_pass, run_passes
from inductor_passes.testing import fake_group, trace

c10d = torch.ops._c10d_functional
ON_REQUEST = (
    "split_regions",
    "keep_within_budget",
    "cap_schedule",
    "move_states",
)  # off unless asked for


def gathered_weight(x, w):
    w_full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return (x @ x) @ w_full


SHAPES = [16, 16], [2, 16]


class Noop(GraphPass):
    name = "noop"

    def run(self, graph):
        return PassStats(False, {"seen": len(graph.nodes)})


class Raises(Noop):
    name = "raises"

    def run(self, graph):
        for node in list(graph.nodes)[3:5]:  # half of the work is done when it fails
            node.meta.pop("val")
        graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[0].target = len
        raise ValueError("no such thing")


class WrongType(Noop):
    name = "wrong_type"

    def run(self, graph):
        return True


class LosesWait(Noop):
    name = "loses_wait"

    def run(self, graph):
        wait = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)[0]
        wait.replace_all_uses_with(wait.args[0])
        graph.erase_node(wait)
        return PassStats(True)


@pytest.fixture
def registered():
    added = []

    def add(pass_, **where):
        added.append(ip.register(pass_, **where))
        return pass_

    yield add
    for pass_ in added:
        ip.unregister(pass_)


def test_passes_run_in_registered_order(registered):
    names = ip.registered_passes()
    start = names.index("schedule")
    first, last = names[:start], names[start + 1 :]
    assert all(name.startswith("fuse_") or name in ON_REQUEST for name in last)
    registered(Noop, before="schedule")
    registered(Raises, after="noop")
    assert ip.registered_passes() == (*first, "noop", "raises", "schedule", *last)
    record = ip.run_passes(trace(gathered_weight, *SHAPES), ip.PassOptions(disable=("raises",)))
    assert [p.name for p in record.passes] == [
        *(name for name in first if name not in ON_REQUEST),
        "noop",
        "schedule",
        *(name for name in last if name not in ON_REQUEST),
    ]
    assert next(p for p in record.passes if p.name == "noop").counters == {"seen": 7}


def test_registering_is_checked(registered):
    registered(Noop)
    registered(Noop)  # the same object twice is once
    assert ip.registered_passes().count("noop") == 1
    with pytest.raises(OptionError, match="registered already"):
        ip.register(type("Other", (Noop,), {}))
    with pytest.raises(OptionError, match="no pass named 'nobody'"):
        ip.register(Raises, before="nobody")
    with pytest.raises(OptionError, match="not a pass"):
        ip.register(print)


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        (Raises, PassFailedError, ["raises", "ValueError: no such thing", "disable"]),
        (WrongType, PassFailedError, ["wrong_type", "returned bool", "PassStats"]),
        (LosesWait, InvariantError, ["loses_wait", "0 waits instead of 1", "test_pipeline.py"]),
    ],
)
def test_a_failing_pass_raises_and_can_be_left_out(registered, broken, error, words):
    registered(broken, after="schedule")
    graph = trace(gathered_weight, *SHAPES)
    line = f'File "{__file__}", line 14, in gathered_weight\n    w_full = ...'
    for node in graph.nodes:
        node.meta["stack_trace"] = line
    with pytest.raises(error) as caught:
        ip.run_passes(graph)
    assert all(word in str(caught.value) for word in words), caught.value

    graph = trace(gathered_weight, *SHAPES)
    record = ip.run_passes(graph, ip.PassOptions(disable=(broken.name,)))
    assert broken.name not in {p.name for p in record.passes}


def test_numerics_decide_what_runs(registered):
    registered(type("Sums", (Noop,), {"name": "sums", "numerics": Numerics.REASSOCIATING}))
    registered(type("Rounds", (Noop,), {"name": "rounds", "numerics": Numerics.APPROXIMATE}))

    def ran(**options):
        record = ip.run_passes(trace(gathered_weight, *SHAPES), ip.PassOptions(**options))
        return [p.name for p in record.passes]

    own = [
        p for p in registry.ordered_passes() if registry.is_built_in(p) and p.name not in ON_REQUEST
    ]
    exact = [p for p in own if p.numerics is Numerics.BITWISE]
    rewrites = [p for p in own if not p.schedules]
    assert ran() == [*(p.name for p in own), "sums"]
    assert ran(exact=True) == ran(exact=True, extra={"split": 2}) == [p.name for p in exact]
    assert "split_regions" in ran(extra={"split": 2})
    assert ran(passes=("rounds", "sums")) == ["sums", "rounds"]
    assert ran(schedule="off") == [*(p.name for p in rewrites), "sums"]


def test_a_graph_without_collectives_is_left_alone(registered):
    graph = trace(lambda x: (x @ x).relu(), [4, 4])
    assert ip.run_passes(graph) is None
    registered(type("Always", (Noop,), {"name": "always", "needs_collectives": False}))
    assert [p.name for p in ip.run_passes(graph).passes] == ["always"]


def test_the_record_tells_what_happened():
    record = ip.run_passes(
        trace(gathered_weight, [4096, 4096], [512, 4096]),
        ip.PassOptions(topology="h100x8"),
        phase="forward",
        graph_id="0/0:forward",
    )
    assert (record.phase, record.topology, record.order_kept) == ("forward", "h100x8", None)
    assert record.order == ("launch all_gather 0", "kernel", "wait 0", "kernel")
    (gather,) = record.collectives
    assert (gather.kind, gather.group_size, gather.payload_bytes) == (
        "all_gather",
        8,
        512 * 4096 * 4,
    )
    assert gather.exposed_before_us > gather.exposed_after_us
    assert record.before.exposed_us > record.after.exposed_us
    assert record.before.compute_us == pytest.approx(record.after.compute_us)


def uuid(**options):
    return attach(Attachment(ip.PassOptions(**options)))[1].uuid()


def test_uuid_changes_with_everything_that_changes_a_graph(registered, tmp_path):
    plain = uuid()
    assert plain == uuid() == uuid(report=str(tmp_path))
    assert attach(Attachment(ip.PassOptions()))[0].uuid() != plain
    seen = {plain, uuid(exact=True), uuid(disable=("merge_tiny",)), uuid(topology="h100x8")}
    assert len(seen) == 4
    registered(Noop)
    assert uuid() not in seen


def test_uuid_of_a_topology_file_follows_its_content(tmp_path):
    from pathlib import Path

    import inductor_passes.cost

    shipped = Path(inductor_passes.cost.topology.__file__).parent / "data" / "h100x8.json"
    copy = tmp_path / "mine.json"
    copy.write_text(shipped.read_text())
    first = uuid(topology=str(copy))
    copy.write_text(shipped.read_text().replace("h100x8", "other"))
    assert uuid(topology=str(copy)) != first


def test_chained_pass_without_uuid_turns_the_cache_off():
    def user_pass(graph):
        return None

    assert attach(Attachment(ip.PassOptions(), chain_post=user_pass))[1].uuid() is None


def test_a_third_party_instance_is_run_as_it_is(registered):
    class Configured(Noop):
        name = "configured"

        def __init__(self, bonus):
            self.bonus = bonus

        def digest(self):
            return str(self.bonus)

        def run(self, graph):
            return PassStats(False, {"bonus": self.bonus})

    one = registered(Configured(1))
    with_one = uuid()
    assert run_pass(one, trace(gathered_weight, *SHAPES)).counters == {"bonus": 1}
    one.bonus = 2
    assert uuid() != with_one


def test_uuid_follows_the_shapes_of_groups():
    """Group "1" of eight neighbours and group "1" of every eighth rank are priced differently."""
    import torch.distributed as dist

    from inductor_passes.testing import fake_group

    def with_group(ranks):
        with fake_group(64):
            dist.new_group(ranks)
            return uuid()

    assert with_group(list(range(8))) != with_group(list(range(0, 64, 8)))


def two_norms(x, y):
    return [c10d.wait_tensor(c10d.all_reduce(t.sum(), "sum", "0")) for t in (x, y)]


def swapped_too(x, y):
    pieces = c10d.wait_tensor(c10d.all_to_all_single(x, [2, 14], [14, 2], "0"))
    return [*two_norms(x, y), pieces]


@pytest.mark.parametrize(
    ("program", "told", "launches"),
    [(two_norms, False, 1), (two_norms, True, 2), (swapped_too, False, 3)],
)
def test_launches_stay_where_other_ranks_may_hold_another_graph(program, told, launches):
    with fake_group(2):
        graph = trace(program, *SHAPES)
        record = run_passes(graph, ranks_differ=told)
    assert len(record.collectives) == launches
    (merge,) = [each for each in record.passes if each.name == "merge_tiny"]
    assert (merge.status == "skipped") == (launches > 1)


def test_ragged_shards_keep_what_plans_show():
    """Which chunk of a sum is this rank's own may depend on its rows, and no plan says it."""
    with fake_group(2):
        merged = run_passes(trace(two_norms, *SHAPES), ragged=True)
        records = {r: run_passes(trace(two_norms, *SHAPES), ragged=r) for r in (False, True)}
    assert len(merged.collectives) == 1
    sliced = {
        ragged: next(p.status for p in record.passes if p.name == "all_reduce_slice")
        for ragged, record in records.items()
    }
    assert sliced == {False: "ran", True: "skipped"}


@pytest.mark.parametrize("pass_", [Noop, Raises])
def test_the_collector_of_cycles_is_paused_while_a_pass_runs(pass_):
    seen = []

    class Asks(pass_):
        def run(self, graph):
            seen.append(gc.isenabled())
            return super().run(graph)

    with fake_group(8):
        with contextlib.suppress(PassFailedError):
            run_pass(Asks(), trace(gathered_weight, *SHAPES))
    assert seen and not any(seen)
    assert gc.isenabled()
