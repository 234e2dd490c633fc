"""Boxed process groups are arguments of custom operators."""

import pytest
import torch
import torch.distributed as dist

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")
CALLED = []


@pytest.fixture(scope="module", autouse=True)
def operator():
    library = torch.library.Library("dynamo_dist_test", "DEF")
    library.define("sized(Tensor x, __torch__.torch.classes.c10d.ProcessGroup group) -> Tensor")

    def sized(x, group):
        CALLED.append(dist.ProcessGroup.unbox(group).group_name)
        return x * dist.ProcessGroup.unbox(group).size()

    library.impl("sized", sized, "CompositeExplicitAutograd")
    torch.library.register_fake("dynamo_dist_test::sized", lambda x, group: torch.empty_like(x))
    yield
    library._destroy()


@pytest.fixture
def groups():
    with fake_mesh(8):
        yield [dist.new_group([0, 1, 2]), dist.new_group([0, 1, 4, 5])]


def program(x, box):
    return torch.ops.dynamo_dist_test.sized(x, box)


def test_another_group_compiles_anew(groups, compiled):
    function, graphs = compiled(program)
    for group in (*groups, groups[0]):
        CALLED.clear()
        assert function(torch.ones(1), group.boxed()).item() == group.size()
        assert CALLED[-1] == group.group_name
    assert len(graphs) == 2


def test_boxed_inside(groups):
    function = torch.compile(
        lambda x, group: program(x, group.boxed()), backend="aot_eager", fullgraph=True
    )
    assert function(torch.ones(1), groups[0]).item() == 3


def test_the_operator_again_with_the_same_arguments(groups):
    def twice(x, box):
        return program(x, box) + program(x, box)

    function = torch.compile(twice, backend="aot_eager", fullgraph=True)
    assert function(torch.ones(1), groups[0].boxed()).item() == 6
