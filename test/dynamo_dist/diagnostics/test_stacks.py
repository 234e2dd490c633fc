"""Which frame is the user's."""

import os
import traceback

import pytest
import torch

from dynamo_dist.diagnostics import breaks
from dynamo_dist.torch_compat import dynamo_frames

TORCH = os.path.dirname(torch.__file__)


def frame(filename, line=3, name="f", code="x()"):
    return traceback.FrameSummary(filename, line, name, line=code, lookup_line=False)


def test_the_innermost_users_frame_is_named():
    stack = [
        frame("/src/train.py", 1),
        frame("/src/model.py", 7, code="dist.barrier()"),
        frame(TORCH + "/distributed/distributed_c10d.py", 99),
    ]
    assert breaks.user_line(stack) == "/src/model.py:7: dist.barrier()"


def test_wrappers_of_the_standard_library_are_not_the_users():
    stack = [
        frame("/src/model.py", 7),
        frame(os.__file__.replace("os.py", "contextlib.py")),
        frame("/env/lib/python3.11/site-packages/typing_extensions.py"),
    ]
    assert breaks.user_line(stack) == "/src/model.py:7: x()"


def test_an_installed_library_is_the_users():
    library = os.__file__.replace("os.py", "site-packages/transformers/llama.py")
    assert breaks.user_line([frame("/src/a.py"), frame(library, 5)]) == f"{library}:5: x()"


def test_with_torch_alone_on_the_stack_the_caller_is_named():
    line = breaks.user_line([frame(TORCH + "/nn/modules/module.py")])
    assert line.startswith(f"{__file__}:")
    assert "breaks.user_line" in line


def test_the_call_path_starts_at_the_user():
    stack = [
        frame("/src/train.py"),
        frame("/src/model.py", name="forward", code="dist.barrier()"),
        frame(TORCH + "/distributed/c10d_logger.py", name="wrapper", code="func()"),
    ]
    assert breaks.call_path(stack) == (
        "model.py: forward: dist.barrier()",
        "torch/distributed/c10d_logger.py: wrapper: func()",
    )
    assert breaks.call_path([]) == ()


def test_an_object_that_answers_anything_is_no_translator():
    class Handler:
        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

        def run(self):
            raise ValueError

    with pytest.raises(ValueError) as failed:
        Handler().run()
    assert dynamo_frames._traced_stack(failed.value) == ()
