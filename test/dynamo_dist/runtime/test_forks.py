"""A process that forks after a compile: the child compiles with threads of its own, and leaves
the job's store alone.
"""

import os
import time

import pytest
import torch.distributed as dist
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile

import dynamo_dist
from inductor_passes.torch_compat import c10d

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")


def holds_in_a_fork(check, seconds=20):
    """Return whether ``check()`` is true in a forked child, and comes to an end there."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return False


@pytest.fixture
def submits(monkeypatch):
    """``submits()``: whether a task that is handed to Inductor's threads runs."""
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    AsyncCompile.pool.cache_clear()
    yield lambda: AsyncCompile.submit(lambda: "done").result(timeout=2) == "done"
    AsyncCompile.pool().shutdown()
    AsyncCompile.pool.cache_clear()


def test_a_forked_process_has_threads_to_build_with(submits):
    with dynamo_dist.enabled():
        assert submits()
        assert holds_in_a_fork(submits)
        assert holds_in_a_fork(lambda: submits() and holds_in_a_fork(submits))
        assert submits()


def test_a_forked_process_does_not_use_its_parents_store():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert c10d.job_store() is not None
        assert holds_in_a_fork(lambda: c10d.job_store() is None)
        assert c10d.job_store() is not None
    finally:
        dist.destroy_process_group()


def test_a_forked_process_uses_the_store_of_its_own_job():
    def has_one():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        return c10d.job_store() is not None

    assert holds_in_a_fork(has_one)
