"""Compiling one graph: what comes with its forward, and what waits until it is needed."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from inductor_passes.inductor import session
from inductor_passes.pass_options import PassOptions
from inductor_passes.ranks import decision
from inductor_passes.torch_compat import c10d, caches
from inductor_passes.torch_compat import inductor as inductor_compat


class Job:
    """One that settles nothing."""

    def digest(self):
        return "job"

    def still_holds(self):
        return lambda: True

    def decide(self, stream, offer):
        raise AssertionError("a graph without launches has nothing to settle")


@pytest.fixture
def phases(monkeypatch):
    """The phases that Inductor compiled, in a job with another rank; its backward graphs do not
    compile at first.
    """
    monkeypatch.setattr(decision, "current", Job)
    monkeypatch.setattr(c10d, "real_groups", lambda: {"0": (0, 1)})
    found = []

    def inner(gm, inputs, **how):
        found.append("backward" if how.get("is_backward") else "forward")
        if found.count("backward") == 1 and found[-1] == "backward":
            raise NotImplementedError("not this one")
        return inductor_compat.run_graph_passes(gm, inputs, **how)

    monkeypatch.setattr(session.CompileSession, "lower_by", staticmethod(inner))
    torch._dynamo.reset()
    return found


def test_failed_backward_compiles_again_when_needed(phases, caplog):
    x = torch.randn(4, 4, requires_grad=True)
    with caches.no_compile_caches():
        y = torch.compile(lambda x: x.sin() * 2, backend=session.compile_with_passes)(x)
        assert phases == ["forward", "backward"] and "not this one" in caplog.text
        y.sum().backward()
    assert phases == ["forward", "backward", "backward"]
    assert torch.allclose(x.grad, 2 * x.cos())


def test_compiled_autograd_needs_no_backward_graph(phases):
    x = torch.randn(4, 4, requires_grad=True)
    with caches.no_compile_caches(), torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: x.sin() * 2, backend=session.compile_with_passes)(x)
    assert phases == ["forward"]


def test_configuration_of_a_session_is_copied_and_pickled():
    module = torch.fx.symbolic_trace(lambda x: x.sin())
    made = session.CompileSession(module, PassOptions(), {})
    made.job = threading.Lock()  # as unfit to be copied as a job's store
    hook = made.patches["post_grad_custom_post_pass"]
    assert copy.deepcopy(hook).attachment.session is made
    there = pickle.loads(pickle.dumps(hook.attachment))
    assert there == hook.attachment and there.session is None


def test_a_backward_that_is_lowered_late_keeps_no_batch():
    weight = torch.randn(4, 4, requires_grad=True)

    def step(batch):
        return (batch @ weight).sum()

    with session.graph_passes_only():
        compiled = torch.compile(step, backend=session.compile_with_passes)
        batch = torch.randn(4, 4)
        seen = weakref.ref(batch)
        compiled(batch)
        del batch
        gc.collect()
    assert seen() is None
