"""Process groups inside compiled functions: eager's values, and a guard for each value that is
used.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.testing import count_graph_breaks, fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")
BY_NAME = dist.distributed_c10d._resolve_process_group
CPU = torch.device("cpu")


class Groups:
    """Groups of 8 fake ranks, seen from rank 0, which is in all but the last."""

    def __init__(self):
        self.world = dist.group.WORLD
        self.four = dist.new_group([0, 1, 2, 3])
        self.other_four = dist.new_group([0, 1, 4, 5])
        self.without_us = dist.new_group([4, 5, 6, 7])


@pytest.fixture
def groups():
    with fake_mesh(8):
        yield Groups()


def matched(group):
    match group:
        case dist.ProcessGroup():
            return 1
        case _:
            return 2


def caught(group):
    try:
        return group.nope
    except AttributeError:
        return 3


# What a program may ask of a group, and of another one beside it.
QUESTIONS = {
    "size": lambda g, h: g.size(),
    "rank": lambda g, h: g.rank(),
    "name": lambda g, h: g.name(),
    "id": lambda g, h: g._id(),
    "group_name": lambda g, h: g.group_name,
    "group_desc": lambda g, h: g.group_desc,
    "bound_device_id": lambda g, h: g.bound_device_id,
    "device_types": lambda g, h: [str(device) for device in g._device_types],
    "backend_name": lambda g, h: g._get_backend_name(),
    "backend": lambda g, h: (g._get_backend(CPU).name(), g._get_backend(CPU).size()),
    "backend_property": lambda g, h: g._get_backend(CPU).supports_splitting,
    "backend_type": lambda g, h: type(g._get_backend(CPU)).__name__,
    "backend_hasattr": lambda g, h: hasattr(g._get_backend(CPU), "nope"),
    "boxed": lambda g, h: hasattr(g.boxed(), "size"),
    "bound_method": lambda g, h: (lambda size: size())(g.size),
    "getattr": lambda g, h: getattr(g, "size")(),  # noqa: B009
    "getattr_default": lambda g, h: getattr(g, "nope", 7),
    "hasattr": lambda g, h: (hasattr(g, "size"), hasattr(g, "group_name"), hasattr(g, "nope")),
    "missing": lambda g, h: caught(g),
    "type_is": lambda g, h: type(g) is dist.ProcessGroup,
    "type_eq": lambda g, h: type(g) == dist.ProcessGroup,  # noqa: E721
    "class": lambda g, h: g.__class__ is dist.ProcessGroup,
    "type_name": lambda g, h: (type(g).__name__, type(g).__module__),
    "isinstance": lambda g, h: (isinstance(g, dist.ProcessGroup), isinstance(g, (int, DeviceMesh))),
    "match": lambda g, h: matched(g),
    "eq": lambda g, h: (g == h, g != h, g == g, g.__eq__(h), g == None),  # noqa: E711
    "is": lambda g, h: (g is h, g is not h, g is None),
    "bool": lambda g, h: (bool(g), not g, (g or h).size()),
    "hash": lambda g, h: (hash(g) == hash(h), hash(g) == hash(g)),
    "dict_key": lambda g, h: ({g: 1, h: 2}[g], {h: 1}.get(g, 5)),
    "set": lambda g, h: (g in {h}, g in {g, h}, len({g, h, g})),
    "in": lambda g, h: (g in [h], g in (h, g), [h, g].index(g)),
    "text": lambda g, h: (repr(g), str(g), f"{g}", f"{g} {h}"),
    "world": lambda g, h: (dist.group.WORLD.size(), dist.GroupMember.WORLD.rank()),
    "get_rank": lambda g, h: (dist.get_rank(), dist.get_rank(g), dist.get_rank(group=h)),
    "get_world_size": lambda g, h: (dist.get_world_size(), dist.get_world_size(g)),
    "ranks": lambda g, h: (dist.get_process_group_ranks(g), dist.get_process_group_ranks(None)),
    "global_rank": lambda g, h: (dist.get_global_rank(g, 1), dist.get_group_rank(g, 1)),
    "get_backend": lambda g, h: dist.get_backend(g),
    "by_name": lambda g, h: BY_NAME(g.group_name).size(),
    "partial": lambda g, h: functools.partial(dist.get_world_size, g)(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_eagers(groups, compiled, question):
    ask = QUESTIONS[question]

    def program(x, g, h):
        return x + 1, ask(g, h)

    x = torch.zeros(2)
    run, _ = compiled(program)
    for g, h in ((groups.four, groups.world), (groups.four, groups.four)):
        assert run(x, g, h)[1] == program(x, g, h)[1]


@pytest.mark.parametrize(
    "question",
    ["size", "rank", "ranks", "name", "eq", "is", "in", "dict_key", "get_world_size", "by_name"],
)
def test_no_recompile_for_the_same_group(groups, compiled, question):
    ask = QUESTIONS[question]
    run, compiles = compiled(lambda x, g, h: (x + 1, ask(g, h)))
    for _ in range(3):
        run(torch.zeros(2), groups.four, groups.world)
    assert len(compiles) == 1


def reads(compiled, ask, first, second):
    """Compiles of ``ask`` for one group, another, and the first again; answers checked."""
    run, compiles = compiled(lambda x, g: (x + 1, ask(g)))
    for group in (first, second, first):
        assert run(torch.zeros(1), group)[1] == ask(group)
    return len(compiles)


@pytest.mark.parametrize(
    "ask",
    [
        lambda g: g.size(),
        lambda g: dist.get_world_size(g),
        lambda g: dist.get_process_group_ranks(g),
        lambda g: g._id(),
        lambda g: hash(g),
        lambda g: g == dist.group.WORLD,
        lambda g: {dist.group.WORLD: 1}.get(g, 2),
    ],
)
def test_another_group_recompiles_once_where_its_value_was_used(groups, compiled, ask):
    assert reads(compiled, ask, groups.four, groups.world) == 2


@pytest.mark.parametrize(
    ("ask", "compiles"),
    [
        (lambda g: 1, 1),  # nothing is used
        (lambda g: isinstance(g, dist.ProcessGroup), 1),
        (lambda g: g.size(), 1),  # both have four ranks
        (lambda g: g.rank(), 1),  # we are the first of both
        (lambda g: dist.get_rank(g) + dist.get_world_size(g), 1),
        (lambda g: dist.get_process_group_ranks(g), 2),  # not the same four
        (lambda g: dist.get_global_rank(g, 3), 2),
        (lambda g: dist.get_backend(g), 1),
        (lambda g: g is dist.group.WORLD, 2),
    ],
)
def test_what_was_not_used_is_not_guarded(groups, compiled, ask, compiles):
    assert reads(compiled, ask, groups.four, groups.other_four) == compiles


def test_a_collective_goes_to_the_group_of_the_call(groups, compiled):
    run, graphs = compiled(lambda x, g: funcol.all_reduce(x, "sum", g))
    for group in (groups.four, groups.other_four, groups.four):
        run(torch.ones(2), group)
    assert len(graphs) == 2
    for graph, group in zip(graphs, (groups.four, groups.other_four), strict=True):
        (launch,) = [n for n in graph.graph.nodes if "all_reduce" in str(n.target)]
        assert group.group_name in launch.args


def test_groups_leave_the_function_as_they_are(groups, compiled):
    def program(x, g):
        return x + 1, g, {"g": [g]}, {g: x}, BY_NAME(g.group_name)

    run, _ = compiled(program)
    _, returned, nested, keyed, named = run(torch.zeros(1), groups.four)
    assert returned is groups.four
    assert nested["g"][0] is groups.four
    assert next(iter(keyed)) is groups.four
    assert named is groups.four


def test_a_group_held_by_an_object(groups, compiled):
    class Holder:
        def __init__(self, group):
            self.group = group

    run, compiles = compiled(lambda x, h: x + h.group.size())
    assert run(torch.zeros(1), Holder(groups.four)).item() == 4
    assert run(torch.zeros(1), Holder(groups.world)).item() == 8
    assert run(torch.zeros(1), Holder(groups.four)).item() == 4
    assert len(compiles) == 2


def test_the_default_group_is_guarded(compiled):
    run, compiles = compiled(lambda x: x + dist.get_world_size() * 10 + dist.get_rank())
    x = torch.zeros(1)
    for world, rank in ((8, 0), (4, 0), (4, 3)):
        with fake_mesh(world, rank=rank):
            assert run(x).item() == world * 10 + rank
            assert run(x).item() == world * 10 + rank
    assert len(compiles) == 3


def test_a_group_that_was_destroyed_does_not_answer_for_its_name(compiled):
    run, _ = compiled(lambda x, name: x + BY_NAME(name).size())
    with fake_mesh(8):
        name = dist.group.WORLD.group_name
        assert run(torch.zeros(1), name).item() == 8
    with fake_mesh(4):
        assert dist.group.WORLD.group_name == name
        assert run(torch.zeros(1), name).item() == 4


def test_a_method_that_acts_breaks_softly(groups, compiled):
    def program(x, g):
        y = x + 1
        g.allreduce([y]).wait()
        return y * 2

    assert count_graph_breaks(program, torch.ones(1), groups.four) >= 1
    run, _ = compiled(program, fullgraph=False)
    torch.compiler.reset()
    assert run(torch.ones(1), groups.four).item() == 4
    torch.compiler.reset()
    with pytest.raises(Exception, match="Method of a distributed object that is written in C"):
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(1), groups.four)


class TimedGroup(dist.ProcessGroup):
    """A group written in Python, with members of its own."""

    def __init__(self, rank, size):
        super().__init__(rank, size)
        self.rate = 5

    @property
    def group_name(self):
        return "timed"

    @property
    def next_rate(self):
        return self.rate + 1

    def twice(self):
        return 2 * self.size()


def test_a_group_written_in_python(groups, compiled):
    group = TimedGroup(0, 4)
    ask = lambda g: (g.size(), g.group_name, g.rate, g.next_rate, g.twice(), type(g).__name__)  # noqa: E731
    run, compiles = compiled(lambda x, g: (x + 1, ask(g), g.rate * x))
    for rate in (5, 5, 7):
        group.rate = rate
        _, answers, product = run(torch.ones(1), group)
        assert answers == ask(group)
        assert product.item() == rate
    assert len(compiles) == 2
