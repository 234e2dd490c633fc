import importlib.util
import os
import sys

import pytest
import torch

from inductor_passes.fused.kernels import availability
from inductor_passes.testing import fake_group


@pytest.fixture
def gpus(monkeypatch):
    """A host with eight devices that reach each other, as far as the probes can tell."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(availability.c10d, "has_symmetric_memory", lambda: True)
    monkeypatch.setattr(availability, "is_installed", lambda: True)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    availability.peer_access_missing.cache_clear()
    yield monkeypatch
    availability.peer_access_missing.cache_clear()


def test_it_runs_on_one_host(gpus):
    with fake_group(8):
        assert availability.why_not("0", "cuda") == ""


def test_a_cpu_has_none():
    assert "tensors are on cpu" in availability.why_not("0", "cpu")


def test_what_is_missing_here_is_named(gpus):
    with fake_group(8):
        gpus.setattr(torch.cuda, "can_device_access_peer", lambda one, other: other != 5)
        availability.peer_access_missing.cache_clear()
        assert "devices 0 and 5" in availability.why_not("0", "cuda")
        gpus.setattr(availability.c10d, "has_symmetric_memory", lambda: False)
        assert "no symmetric memory" in availability.why_not("0", "cuda")
        gpus.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
        assert "older than capability 8.0" in availability.why_not("0", "cuda")
        gpus.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA device" in availability.why_not("0", "cuda")
        gpus.setattr(availability, "is_installed", lambda: False)
        assert "triton is not installed" in availability.why_not("0", "cuda")


def test_groups_that_cannot(gpus):
    with fake_group(1):
        assert "one rank" in availability.why_not("0", "cuda")
    with fake_group(16):
        assert "LOCAL_WORLD_SIZE" in availability.why_not("0", "cuda")
        gpus.setenv("LOCAL_WORLD_SIZE", "8")
        assert "crosses hosts" in availability.why_not("0", "cuda")
        gpus.setenv("LOCAL_WORLD_SIZE", "16")
        assert availability.why_not("0", "cuda") == ""
    with fake_group(128):
        assert "room for 64" in availability.why_not("0", "cuda")
    assert "no process group" in availability.why_not("0", "cuda")


def test_installed_is_what_python_finds():
    assert availability.is_installed() == (importlib.util.find_spec("triton") is not None)


@pytest.mark.skipif(
    not os.environ.get("CI") or sys.platform != "linux", reason="only CI must have triton"
)
def test_ci_has_triton():
    # Without it the proofs of kernels would be skipped, and nobody would see.
    assert availability.is_installed()
