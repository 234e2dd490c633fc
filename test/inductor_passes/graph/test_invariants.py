import pytest
import torch

from inductor_passes.errors import InvariantError
from inductor_passes.graph.invariants import Communication, check_communication
from inductor_passes.testing import trace

c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default


def program(x):
    a = c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))
    b = c10d.wait_tensor(c10d.all_reduce(x + 1, "sum", "0"))
    return a + b


def lose_wait(graph):
    wait = graph.find_nodes(op="call_function", target=WAIT)[0]
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)


def read_early(graph):
    wait = graph.find_nodes(op="call_function", target=WAIT)[0]
    add = next(n for n in graph.nodes if n.name == "add_1")
    add.replace_input_with(wait, wait.args[0])


def use_before_definition(graph):
    first = graph.find_nodes(op="call_function", target=WAIT)[0]
    first.args[0].prepend(first)


def add_unwaited(graph):
    launch = graph.find_nodes(op="call_function", target=c10d.all_reduce.default)[1]
    with graph.inserting_after(launch):
        graph.call_function(c10d.all_reduce.default, launch.args).meta.update(launch.meta)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (lose_wait, "0 waits instead of 1"),
        (read_early, "reads %all_reduce without waiting"),
        (use_before_definition, "graph.lint"),
        (add_unwaited, "0 waits instead of 1"),
    ],
)
def test_a_broken_graph_is_named(plant, message):
    graph = trace(program, [4])
    before = Communication.of(graph)
    check_communication(before, graph, "sound", keeps_launch_order=True)
    plant(graph)
    with pytest.raises(InvariantError, match=message) as caught:
        check_communication(before, graph, "planted", keeps_launch_order=True)
    assert "The pass planted broke the graph" in str(caught.value)
    assert "disable" in caught.value.fix


def test_order_may_change_between_groups_and_where_allowed():
    def two(x, y):
        return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")), c10d.wait_tensor(
            c10d.all_reduce(y, "sum", "1")
        )

    graph = trace(two, [4], [4])
    before = Communication.of(graph)
    first, second = before.order
    first.prepend(second)
    check_communication(before, graph, "swap", keeps_launch_order=True)

    graph = trace(program, [4])
    before = Communication.of(graph)
    add = next(n for n in graph.nodes if n.name == "add")
    before.order[0].prepend(add)
    add.append(before.order[1])
    check_communication(before, graph, "swap", keeps_launch_order=False)
    with pytest.raises(InvariantError, match="changed their order"):
        check_communication(before, graph, "swap", keeps_launch_order=True)
