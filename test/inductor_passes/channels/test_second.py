"""Launches on second channels: which, what for, that ranks follow one plan, and what is told and refused."""

import logging

import pytest
import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

import inductor_passes
from inductor_passes.agree.graph import Frame, number_launches, plan_of
from inductor_passes.agree.plan import LaunchPlan
from inductor_passes.channels import second
from inductor_passes.errors import CannotFollowError, GroupError, InvariantError, OptionError
from inductor_passes.graph import channels
from inductor_passes.graph.collectives import group_name, launches
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import run_pass, run_passes
from inductor_passes.testing import FixedCost, fake_group, trace
from inductor_passes.testing.lockstep import run_in_lockstep

c10d = torch.ops._c10d_functional
RANKS = 4


class Floors(FixedCost):
    """A launch takes 40 us to start and 1 us for 64 bytes; a product 50."""

    def compute_us(self, node):
        return 50.0 if "mm" in str(node.target) else 0.0

    def link_us(self, launch, payload_bytes):
        return 40.0 + sum(payload_bytes) / 64

    def launch_us(self, launch):
        return self.link_us(launch, [t.numel() * 4 for t in [launch.args[0].meta["val"]]])


def program(x, *shards):
    """Gathers of weights in front, reductions of what is made of them behind: one queue for all."""
    sums = []
    for shard in shards:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, RANKS, "0"))
        x = x @ whole
        sums.append(c10d.wait_tensor(c10d.reduce_scatter_tensor(x.t() @ x, "sum", RANKS, "0")))
    return x, *sums


@pytest.fixture(autouse=True)
def no_clones():
    yield
    channels.forget()
    second._say_once.cache_clear()


@pytest.fixture
def ranks():
    with fake_group(RANKS):
        clone = dist.new_group(list(range(RANKS)))
        yield clone.group_name


def traced():
    return trace(program, [32, 32], *[[8, 32]] * 4, world_size=RANKS)


def passed(graph, **options):
    return run_passes(graph, PassOptions(channels=2, **options), cost=Floors())


def used(graph):
    return [channels.number(launch) for launch in launches(graph)]


def test_gathers_or_reductions_go_on_the_second_channel_and_the_step_is_shorter(ranks):
    channels.add("0", ranks)
    graph, other = traced(), traced()
    record = passed(graph, disable=("bucket_averages", "bucket_gathers", "merge_tiny"))
    one = run_passes(
        other,
        PassOptions(disable=("bucket_averages", "bucket_gathers", "merge_tiny")),
        cost=Floors(),
    )
    assert set(used(graph)) == {1, 2}
    assert record.after.makespan_us < 0.99 * one.after.makespan_us
    kinds = {str(n.target) for n in launches(graph) if channels.number(n) == 2}
    assert len(kinds) == 1  # of one kind: a queue of each
    assert "launches on second channels" in str([p.notes for p in record.passes])


def test_numbers_stay(ranks):
    channels.add("0", ranks)
    graph, whole = traced(), traced()
    passed(graph, disable=("bucket_averages", "bucket_gathers", "merge_tiny"))
    assert 2 in used(graph)
    given = [[torch.randn(32, 32), *(torch.randn(8, 32) for _ in range(4))] for _ in range(RANKS)]
    groups = {"0": range(RANKS), ranks: range(RANKS)}
    found = run_in_lockstep([graph] * RANKS, given, groups)
    torch.testing.assert_close(found, run_in_lockstep([whole] * RANKS, given))


def test_without_the_call_it_warns_once_and_does_nothing(ranks, caplog):
    graph = traced()
    with caplog.at_level(logging.WARNING):
        passed(graph)
        passed(traced())
    assert set(used(graph)) == {1}
    assert sum("clone_groups(mesh)" in message for message in caplog.messages) == 1


def test_a_destroyed_clone_is_none(ranks):
    channels.add("0", ranks)
    assert channels.known() == {"0": ranks}
    dist.destroy_process_group(dist.distributed_c10d._resolve_process_group(ranks))
    assert channels.known() == {}


def test_what_gains_nothing_stays_on_one_channel(ranks):
    channels.add("0", ranks)
    graph = traced()
    free = FixedCost(launch=0, mm=10)
    run_passes(graph, PassOptions(channels=2), cost=free)
    assert set(used(graph)) == {1}


def numbered():
    graph = traced()
    number_launches(graph, lambda name: (0, 1, 2, 3), Frame(), phase="inference", graph_id="g")
    return graph


def test_another_rank_follows_the_channels_of_a_plan(ranks):
    channels.add("0", ranks)
    graph = numbered()
    passed(graph, disable=("bucket_averages", "bucket_gathers", "merge_tiny"))
    plan = LaunchPlan.of(plan_of(graph).text)
    other = numbered()
    run_passes(other, PassOptions(channels=2), cost=FixedCost(launch=1, mm=1), follow=plan)
    assert plan_of(other) == plan
    assert [group_name(n) for n in launches(other)] == [group_name(n) for n in launches(graph)]
    channels.forget()
    with pytest.raises(CannotFollowError, match="second channel"):
        run_passes(numbered(), PassOptions(channels=2), cost=Floors(), follow=plan)


def test_a_launch_on_a_group_of_others_is_found(ranks, monkeypatch):
    channels.add("0", ranks)
    stranger = dist.new_group([0, 1]).group_name
    put = second._put
    monkeypatch.setattr(
        second, "_put", lambda some, groups: put(some, dict.fromkeys(some, stranger))
    )
    with pytest.raises(InvariantError, match="no clone"):
        run_pass(second.SecondChannels(Floors()), traced())


def test_bad_input(ranks):
    mesh = init_device_mesh("cpu", (RANKS,))
    with pytest.raises(GroupError, match="fake, or was destroyed"):
        inductor_passes.clone_groups(mesh)
    with pytest.raises(OptionError, match="got 'mesh'"):
        inductor_passes.clone_groups("mesh")
    for value in (0, 3, True, "two", 1.5):
        with pytest.raises(OptionError, match="channels"):
            PassOptions(channels=value)
    with pytest.raises(OptionError, match="global scheduler"):
        PassOptions(channels=2, schedule="local")
