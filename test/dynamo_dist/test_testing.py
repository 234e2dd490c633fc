"""What we offer for tests of programs."""

import pytest
import torch
import torch.distributed as dist

from dynamo_dist.testing import count_graph_breaks, fake_mesh


def test_a_fake_mesh_comes_and_goes():
    with fake_mesh(2, 3, names=("dp", "tp"), rank=4) as mesh:
        assert mesh.shape == (2, 3)
        assert mesh.mesh_dim_names == ("dp", "tp")
        assert tuple(mesh.get_coordinate()) == (1, 1)
        assert dist.get_world_size() == 6
    assert not dist.is_initialized()
    with fake_mesh() as mesh:
        assert mesh.size() == 8


def test_a_fake_mesh_goes_when_the_block_raises():
    with pytest.raises(ZeroDivisionError), fake_mesh():
        1 / 0
    assert not dist.is_initialized()


def test_a_fake_mesh_takes_no_one_elses_group():
    with fake_mesh(2):
        with pytest.raises(RuntimeError, match="makes its own process group"), fake_mesh(4):
            pass
        assert dist.get_world_size() == 2


def once(x):
    y = x + 1
    print("a break")
    return y * 2


def twice(x):
    y = x + 1
    print("a break")
    y = y * 2
    print("another")
    return y + 1


def test_graph_breaks_are_counted(capsys):
    x = torch.ones(2)
    assert count_graph_breaks(torch.sin, x) == 0
    assert count_graph_breaks(once, x) == 1
    assert count_graph_breaks(twice, x) == 2


def test_a_frame_that_cannot_be_traced_at_all_counts():
    def inside_a_loop(xs):
        for x in iter(lambda: xs.pop() if xs else None, None):
            torch._dynamo.graph_break()
            x.add_(1)

    assert count_graph_breaks(inside_a_loop, [torch.ones(1), torch.ones(1)]) >= 1
