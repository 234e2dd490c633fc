import pytest
import torch
import torch.distributed as dist

from inductor_passes.errors import GroupError
from inductor_passes.inductor.hooks import check_groups
from inductor_passes.testing import fake_group, trace
from inductor_passes.torch_compat import c10d as c10d_compat

c10d = torch.ops._c10d_functional


def program(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", "0"))


def test_a_live_group_that_serves_the_device_passes():
    with fake_group(2):
        check_groups(trace(program, [4]))


def test_no_group_is_said_while_compiling():
    graph = trace(program, [4])
    assert not dist.is_initialized()
    with pytest.raises(GroupError, match=r"group '0', which does not exist.*init_process_group"):
        check_groups(graph)


def test_device_without_a_backend_is_named_at_compile_time(monkeypatch):
    with fake_group(2):
        graph = trace(program, [4])
        monkeypatch.setattr(c10d_compat, "group_device_types", lambda name: frozenset({"cuda"}))
        launch = next(n for n in graph.nodes if "all_reduce" in n.name)
        launch.meta["stack_trace"] = 'File "model.py", line 7, in forward\n    dist.all_reduce(x)'
        with pytest.raises(GroupError, match=r"cpu tensor.*serve cuda \(from model.py:7.*init_dev"):
            check_groups(graph)


def test_what_a_real_group_serves_is_read():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert c10d_compat.group_device_types("0") == {"cpu"} | (
            c10d_compat.group_device_types("0") - {"cpu"}
        )
        assert c10d_compat.group_device_types("nobody") is None
    finally:
        dist.destroy_process_group()
