"""Placements inside compiled functions: text, hash, copies, and placements that leave the
function.
"""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

pytestmark = pytest.mark.usefixtures("enabled")


class ScaledPartial(Partial):
    """A subclass with state of its own, as SimpleFSDP has one."""

    def __init__(self, factor):
        super().__init__("sum")
        self.factor = factor

    def __eq__(self, other):
        return isinstance(other, ScaledPartial) and self.factor == other.factor

    def __hash__(self):
        return hash(self.factor)

    def __repr__(self):
        return f"ScaledPartial({self.factor})"

    def __str__(self):
        return f"SP{self.factor}"

    def twice(self):
        return 2 * self.factor


def matched(placement):
    match placement:
        case Shard(dim=1):
            return 1
        case Partial(reduce_op="sum"):
            return 2
        case _:
            return 3


def caught(placement):
    try:
        return placement.nope
    except AttributeError:
        return 4


QUESTIONS = {
    "text": lambda p: (repr(p), str(p), f"{p} {p!r}", f"{p} of {p!r}", ",".join(map(str, [p, p]))),
    "hash": lambda p: (hash(p) == hash(p), {p: 1}[p], len({p, Replicate()}), p in {Shard(1)}),
    "eq": lambda p: (p == Shard(1), p != Shard(1), p == 3, p in [Shard(1), Replicate()]),
    "dunders": lambda p: (p.__eq__(Shard(1)), p.__hash__() == hash(p), p.__repr__()),
    "type": lambda p: (type(p) is Shard, type(p) in (Shard, Partial), type(p).__name__),
    "class": lambda p: (p.__class__ is Shard, p.__class__ is type(p), {Shard: 1}.get(type(p), 2)),
    "class_of_new": lambda p: (Shard(1).__class__ is type(p), type(Shard(1)) is Shard),
    "isinstance": lambda p: (isinstance(p, Shard), isinstance(p, (Replicate, Partial))),
    "match": lambda p: matched(p),
    "hasattr": lambda p: (hasattr(p, "dim"), hasattr(p, "is_shard"), hasattr(p, "nope")),
    "class_hasattr": lambda p: (hasattr(type(p), "is_shard"), hasattr(Shard, "nope")),
    "getattr": lambda p: (getattr(p, "nope", 5), getattr(p, "reduce_op", None)),
    "numbers": lambda p: (getattr(p, "dim", 6), getattr(p, "split_factor", 7)),
    "missing": lambda p: caught(p),
    "kind": lambda p: (p.is_shard(), p.is_replicate(), p.is_partial(), p.is_shard(dim=1)),
    "copy": lambda p: copy.copy(p),
    "deepcopy": lambda p: (copy.deepcopy(p), copy.deepcopy([p, {"p": p}])),
    "returned": lambda p: (p, [p, (p, Replicate())], Shard(2), Partial("max")),
    "strided": lambda p: _StridedShard(0, split_factor=2),
    "sorted": lambda p: sorted([p, Replicate()], key=str),
    "key": lambda p: {str(p): p},
}
PLACEMENTS = [Shard(1), Replicate(), Partial(), _StridedShard(1, split_factor=2), ScaledPartial(3)]


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda p: type(p).__name__)
def test_answers_are_eagers(compiled, placement, question):
    if isinstance(placement, ScaledPartial) and "copy" in question:
        pytest.skip("eager cannot copy it: torch's placements are not picklable from Python")
    ask = QUESTIONS[question]
    run, compiles = compiled(lambda x, p: (x + 1, ask(p)))
    for _ in range(2):
        assert run(torch.zeros(2), placement)[1] == ask(placement)
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda p: p.is_shard(),
        lambda p: hash(p) == hash(Shard(0)),
        lambda p: str(p),
        lambda p: {Shard(0): 1}.get(p, 2),
    ],
)
def test_another_placement_recompiles_and_an_equal_one_does_not(compiled, ask):
    run, compiles = compiled(lambda x, p: (x + 1, ask(p)))
    for placement in (Shard(0), Replicate(), Shard(0), Replicate()):
        assert run(torch.zeros(1), placement)[1] == ask(placement)
    assert len(compiles) == 2


def test_placements_of_an_inner_dtensor_are_returned(mesh, compiled):
    tensor = DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(0)], run_check=False)
    run, _ = compiled(lambda d: (d * 2, d.sum(0).placements, (d * 2).placements[0]))
    _, summed, doubled = run(tensor)
    assert summed == (Partial(),)
    assert type(summed[0]) is Partial
    assert type(doubled) is Shard
    assert doubled == Shard(0)


def test_they_leave_as_themselves_from_an_aot_graph_too(mesh):
    tensor = DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(0)], run_check=False)
    run = torch.compile(lambda d: (d * 2, d.sum(0).placements), backend="aot_eager", fullgraph=True)
    _, (placement,) = run(tensor)
    assert type(placement) is Partial


def test_other_split_factor_recompiles_and_an_equal_one_does_not(compiled):
    run, compiles = compiled(lambda x, p: x + p.split_factor)
    for factor in (2, 3, 2, 3):
        assert run(torch.zeros(1), _StridedShard(0, split_factor=factor)).item() == factor
    assert len(compiles) == 2


def test_a_subclass_made_inside_is_made_anew_at_each_call(compiled):
    run, compiles = compiled(lambda x: (x + ScaledPartial(4).twice(), ScaledPartial(4)))
    first, second = run(torch.zeros(1)), run(torch.zeros(1))
    assert first[0].item() == 8
    assert type(first[1]) is ScaledPartial
    assert first[1] == second[1] == ScaledPartial(4)
    assert first[1] is not second[1]
    first[1].factor = 5
    assert run(torch.zeros(1))[1].factor == 4
    assert len(compiles) == 1


def test_a_subclass_that_torch_never_initialised(compiled):
    class Bare(Placement):
        def __init__(self, key):
            self.key = key

        def __eq__(self, other):
            return isinstance(other, Bare) and self.key == other.key

        def __hash__(self):
            return hash(self.key)

    run, _ = compiled(lambda x: (x + Bare(3).key, Bare(2)))
    value, made = run(torch.zeros(1))
    assert value.item() == 3
    assert made == Bare(2)


def test_other_copies_are_upstreams(compiled):
    run, _ = compiled(lambda x, things: (copy.deepcopy(things), x + 1))
    things = [[1, 2], (3,), "text"]
    deep, _ = run(torch.zeros(1), things)
    assert deep == things
    assert deep[0] is not things[0]


def test_the_split_factor_of_one_made_inside():
    def five(x):
        return x + _StridedShard(0, split_factor=4).split_factor

    found = torch.compile(five, backend="eager", fullgraph=True)(torch.ones(2))
    assert torch.equal(found, five(torch.ones(2)))
