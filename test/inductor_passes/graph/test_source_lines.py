"""Which frame of a stack is shown for a collective."""

import pytest
import torch
from torch import fx

from inductor_passes.graph import printing

USER = '  File "/home/me/model.py", line 7, in forward\n    y = self.up(x)\n'
TORCH = f'  File "{torch.nn.__file__}", line 1, in forward\n    F.linear(x)\n'
LIBRARY = '  File "/opt/plugin/gather.py", line 3, in whole\n    gathered = gather(shard)\n'


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    monkeypatch.setattr(printing, "_libraries", set(printing._libraries))


@pytest.mark.parametrize("stack", [USER, USER + TORCH, USER + LIBRARY, USER + TORCH + LIBRARY])
def test_the_innermost_frame_outside_libraries(stack):
    printing.add_library("/opt/plugin/__init__.py")
    assert printing.innermost_user_frame(stack) == "/home/me/model.py:7: y = self.up(x)"


def test_another_package_is_the_users():
    assert printing.innermost_user_frame(USER + LIBRARY).startswith("/opt/plugin/gather.py:3")


def test_without_a_user_it_is_torchs():
    printing.add_library("/opt/plugin/__init__.py")
    assert printing.innermost_user_frame(TORCH + LIBRARY).endswith("F.linear(x)")
    assert printing.innermost_user_frame("") == ""


@pytest.mark.parametrize("key", ["nn_module_stack", "fwd_nn_module_stack"])
def test_behind_a_library_alone_it_is_the_module(key):
    printing.add_library("/opt/plugin/__init__.py")
    node = fx.Graph().placeholder("x")
    node.meta["stack_trace"] = LIBRARY
    assert printing.user_line(node) == ""
    node.meta[key] = {
        "1": ("L['self'].layers.0", torch.nn.Sequential),
        "2": ("L['self'].layers.0.up", torch.nn.Linear),
    }
    assert printing.user_line(node) == "module layers.0.up (Linear)"
