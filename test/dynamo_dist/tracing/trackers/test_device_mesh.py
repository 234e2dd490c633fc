"""Device meshes inside compiled functions: eager's answers for what upstream leaves closed."""

import copy

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


def caught(mesh):
    try:
        return mesh.nope
    except AttributeError:
        return 3


def raised(ask, mesh):
    try:
        ask(mesh)
    except (LookupError, RuntimeError):
        return True
    return False


# Each raises in eager mode, and so in the traced program, which may catch it.
ASKED_FOR_WHAT_IS_NOT_THERE = [
    lambda m: m["nope"],
    lambda m: m.get_group("nope"),
    lambda m: m.get_group(),  # of which dimension?
    lambda m: m.get_local_rank("nope"),
    lambda m: m.size(7),
]


def matched(mesh):
    match mesh:
        case DeviceMesh(ndim=2):
            return 1
        case _:
            return 2


QUESTIONS = {
    "type_is": lambda m: type(m) is DeviceMesh,
    "type_eq": lambda m: type(m) == DeviceMesh,  # noqa: E721
    "type_in": lambda m: type(m) in (int, DeviceMesh),
    "class": lambda m: m.__class__ is DeviceMesh,
    "type_name": lambda m: type(m).__name__,
    "isinstance": lambda m: (isinstance(m, DeviceMesh), isinstance(m, (int, str))),
    "match": lambda m: matched(m),
    "hasattr": lambda m: (hasattr(m, "ndim"), hasattr(m, "size"), hasattr(m, "nope")),
    "getattr": lambda m: (getattr(m, "size")(1), getattr(m, "nope", 5)),  # noqa: B009
    "missing": lambda m: caught(m),
    "bool": lambda m: (bool(m), m is None, (m or None).ndim),
    "eq": lambda m: (m == m, m != m, m in [m], {m: 1}[m]),
    "hash": lambda m: hash(m) == hash(m),
    "text": lambda m: (repr(m), str(m), f"{m}", f"{m} of {m!r}"),
    "size": lambda m: (m.size(), m.size(1), m.size(mesh_dim=0), m.shape, m.ndim),
    "names": lambda m: (m.mesh_dim_names, [m[name].size() for name in m.mesh_dim_names]),
    "device_type": lambda m: torch.device(m.device_type).type,
    "coordinate": lambda m: (m.get_coordinate(), m.get_rank(), m.get_local_rank("tp")),
    "get_group": lambda m: (m.get_group("tp").size(), m.get_group(0).group_name),
    "get_all_groups": lambda m: [group.size() for group in m.get_all_groups()],
    "slice": lambda m: (m["tp"].size(), m["tp"].mesh_dim_names, repr(m["dp"])),
    "slice_groups": lambda m: [group.size() for group in m["tp"].get_all_groups()],
    "slice_type": lambda m: (type(m["tp"]) is DeviceMesh, hasattr(m["tp"], "nope")),
    "slice_eq": lambda m: (m["tp"] == m["tp"], m["tp"] == m["dp"], {m["tp"]: 1}[m["tp"]]),
    "copy": lambda m: (copy.copy(m) == m, copy.deepcopy(m["tp"]).size()),
    "class_hasattr": lambda m: (hasattr(DeviceMesh, "size"), hasattr(type(m), "nope")),
}


@pytest.mark.parametrize("ask", ASKED_FOR_WHAT_IS_NOT_THERE)
def test_the_program_catches_what_eager_raises(mesh, compiled, ask):
    run, compiles = compiled(lambda x, m: (x + 1, raised(ask, m)))
    assert raised(ask, mesh)
    assert run(torch.zeros(2), mesh)[1]
    assert len(compiles) == 1


@pytest.mark.parametrize("question", QUESTIONS)
def test_answers_are_eagers(mesh, compiled, question):
    ask = QUESTIONS[question]
    run, compiles = compiled(lambda x, m: (x + 1, ask(m)))
    for _ in range(2):
        assert run(torch.zeros(2), mesh)[1] == ask(mesh)
    assert len(compiles) == 1


@pytest.mark.parametrize(
    "ask",
    [
        lambda m: m.size(0),
        lambda m: m.get_group(0).size(),
        lambda m: [group.size() for group in m.get_all_groups()],
        lambda m: (type(m) is DeviceMesh, hasattr(m, "nope"), repr(m)),
    ],
)
def test_the_mesh_of_an_intermediate_dtensor(mesh, compiled, ask):
    tensor = DTensor.from_local(torch.ones(2, 4), mesh["tp"], [Shard(0)], run_check=False)
    run, _ = compiled(lambda d: (d + 1, ask((d * 2).device_mesh)))
    assert run(tensor)[1] == ask(mesh["tp"])


def test_another_mesh_recompiles_once(mesh, compiled):
    flat = init_device_mesh("cpu", (8,), mesh_dim_names=("tp",))
    run, compiles = compiled(lambda x, m: x + len(m.get_all_groups()) + len(repr(m)))
    x = torch.zeros(1)
    for which in (mesh, flat, mesh):
        assert run(x, which).item() == which.ndim + len(repr(which))
    assert len(compiles) == 2


def test_a_collective_on_a_group_from_get_all_groups(mesh, compiled):
    run, (graphs) = compiled(lambda x, m: funcol.all_reduce(x, "sum", m.get_all_groups()[1]))
    run(torch.ones(2), mesh)
    (launch,) = [n for n in graphs[0].graph.nodes if "all_reduce" in str(n.target)]
    assert mesh.get_group("tp").group_name in launch.args


def test_a_mesh_leaves_the_function_as_it_is(mesh, compiled):
    run, _ = compiled(lambda x, m: (x + 1, m, {"m": [m]}, m.get_all_groups()[0]))
    _, returned, nested, group = run(torch.zeros(1), mesh)
    assert returned is mesh
    assert nested["m"][0] is mesh
    assert group is mesh.get_group(0)


def test_mesh_slice_in_a_graph_lowers_through_inductor(mesh):
    targets = []

    def show(graph, inputs):
        targets.extend(n.target for n in graph.graph.nodes if "submesh" in n.name)
        return make_boxed_func(graph.forward)

    def program(x, mesh):
        return DTensor.from_local(x, mesh["tp"], [Shard(0)], run_check=False) * 2

    y = torch.compile(program, backend=aot_autograd(fw_compiler=show), fullgraph=True)(
        torch.ones(2), mesh
    )
    assert y.device_mesh == mesh["tp"]
    assert targets and all(isinstance(target, torch._ops.OpOverload) for target in targets)


def test_the_same_mesh_again_after_its_groups_were_destroyed():
    for _ in range(2):
        with fake_mesh(2, 4, names=("dp", "tp")) as mesh:
            assert mesh.size() == 8
