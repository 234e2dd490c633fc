"""The digest of a traced graph: one for ranks whose graphs make equal code, another for all
others.
"""

import copy
import operator
import pickle

import pytest
import torch
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from inductor_passes.inductor.cache_keys import NoDigestError, TracedProgram
from inductor_passes.testing import fake_group, trace
from inductor_passes.torch_compat import meshes

c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def program(x, w):
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x * 2, 2, "0"))
    return gathered.view(-1, 4) @ w


def traced(change=None, shapes=((4, 4), (4, 4)), **how):
    graph = trace(program, *map(list, shapes), **how)
    if change is not None:
        change(graph)
    return fx.GraphModule({}, graph)


def digest(*args, **how):
    return TracedProgram(traced(*args, **how)).digest


def only(graph, target):
    (node,) = graph.find_nodes(op="call_function", target=target)
    return node


def another_number(graph):
    only(graph, aten.mul.Tensor).update_arg(1, 3)


def another_type_of_number(graph):
    only(graph, aten.mul.Tensor).update_arg(1, 2.0)


def another_group(graph):
    only(graph, c10d.all_gather_into_tensor.default).update_arg(2, "1")


def another_operator(graph):
    only(graph, aten.mul.Tensor).target = aten.add.Tensor


def another_mark(graph):
    only(graph, aten.mul.Tensor).meta["partitioner_tag"] = "is_backward"


def another_dtype(graph):
    node = only(graph, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].double()


def other_strides(graph):
    node = only(graph, aten.mul.Tensor)
    node.meta["val"] = node.meta["val"].t()


def another_order_of_arguments(graph):
    node = only(graph, aten.mm.default)
    node.args = node.args[::-1]


CHANGES = [
    *(another_number, another_type_of_number, another_group, another_operator, another_mark),
    *(another_dtype, other_strides, another_order_of_arguments),
]


def test_equal_graphs_have_one_digest():
    def named_otherwise(graph):
        for node in graph.nodes:
            node.name = f"{node.name}_of_another_rank"
            node.meta["stack_trace"] = "elsewhere"

    assert digest() == digest() == digest(named_otherwise)


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_whatever_makes_other_code_is_in_it(change):
    assert digest(change) != digest()


def test_shapes_and_symbols_are_in_it():
    assert len({digest(), digest(shapes=((6, 4), (4, 4))), digest(dynamic=True)}) == 3


def spec(mesh):
    return DTensorSpec(mesh, (Shard(0),), tensor_meta=TensorMeta((4, 4), (4, 1), torch.float32))


def test_a_place_in_a_mesh_is_not_in_it_and_the_mesh_is():
    graph = traced()
    with fake_group(4, rank=0):
        mine = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        first = TracedProgram(graph, spec(mine))
        known, place = pickle.dumps(spec(mine)), tuple(mine.get_coordinate())
        other = TracedProgram(graph, spec(init_device_mesh("cpu", (4,), mesh_dim_names=("b",))))
        replicated = copy.copy(spec(mine))
        replicated.placements = (Replicate(),)
        assert len({first.digest, other.digest, TracedProgram(graph, replicated).digest}) == 3
    with fake_group(4, rank=3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        third = TracedProgram(graph, spec(mesh))
        assert third.digest == first.digest
        with meshes.unpickled_as(third.meshes):
            found = pickle.loads(known).mesh
        at = [tuple(each.get_coordinate()) for each in (found, mesh)]
        assert at == [(1,), (1,)] and place == (0,)
        with pytest.raises(meshes.UnknownMeshError), meshes.unpickled_as({}):
            pickle.loads(known)
    assert "unpickled_as" not in str(type(mesh).__setstate__)


def test_constants_count_by_what_they_hold():
    def with_constant(value):
        gm = traced()
        gm.register_buffer("constant", value)
        with gm.graph.inserting_before(gm.graph.output_node()):
            gm.graph.get_attr("constant")
        return gm

    one, two = (TracedProgram(with_constant(torch.full((2,), float(n)))).digest for n in (1, 2))
    assert one != two
    with pytest.raises(NoDigestError, match="a constant of the graph"):
        TracedProgram(with_constant(torch.zeros(2**15)))


@pytest.mark.parametrize("value", [object(), lambda: None, operator.attrgetter("x")])
def test_what_has_no_text_in_another_process_has_no_digest(value):
    with pytest.raises(NoDigestError):
        TracedProgram(traced(), value)
