"""Meshes in the keys of torch's caches: the same text in every process of a rank, and another
for what differs.
"""

import pytest
import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler
from torch._inductor.codecache import FxGraphCachePickler
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import init_device_mesh

import dynamo_dist
from inductor_passes.testing import fake_group
from inductor_passes.torch_compat.meshes import content

NAMES = ("dp", "tp")


def made(rank, shape=(2, 4), names=NAMES, flat=True):
    """A mesh of fake ranks as another process of rank ``rank`` makes it."""
    with fake_group(8, rank):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if flat:
            mesh._flatten("both")  # root and flat mesh hold each other
        return mesh


def key(pickler, mesh):
    graph = torch.fx.symbolic_trace(lambda x: x)
    return pickler(graph).dumps(FakeScriptObject(mesh, "DeviceMesh", mesh))


@pytest.mark.parametrize("pickler", [FxGraphCachePickler, AOTAutogradCachePickler])
def test_what_python_calls_a_hash_is_in_no_key(enabled, pickler):
    here, there = made(1), made(1)
    hash(here)  # kept in the mesh, and another number in each process
    assert key(pickler, here) == key(pickler, there)
    with fake_group(8, 1):
        assert key(pickler, here["tp"]) == key(pickler, there["tp"]) != key(pickler, here)


def test_upstream_has_it_there():
    here, there = (made(1, flat=False) for _ in range(2))
    hash(here)
    assert key(FxGraphCachePickler, here) != key(FxGraphCachePickler, there)
    with dynamo_dist.enabled():
        pass
    assert key(FxGraphCachePickler, here) != key(FxGraphCachePickler, there)


def test_a_mesh_is_told_from_one_of_another_rank_layout_or_name():
    meshes = [made(0), made(1), made(0, (4, 2)), made(0, names=("a", "b"))]
    assert len({content(mesh) for mesh in meshes}) == len(meshes)


def test_a_submesh_is_told_from_that_of_another_root():
    with fake_group(8):
        one, other = (
            init_device_mesh("cpu", (2, 4), mesh_dim_names=names)["tp"]
            for names in (NAMES, ("pp", "tp"))
        )
    assert one == other and content(one) != content(other)


def test_other_objects_are_pickled_as_upstream_does(enabled):
    def pickled():
        graph = torch.fx.symbolic_trace(lambda x: x)
        return FxGraphCachePickler(graph).dumps(FakeScriptObject("wrapped", "Other", None))

    ours = pickled()
    dynamo_dist.disable()
    assert ours == pickled()
