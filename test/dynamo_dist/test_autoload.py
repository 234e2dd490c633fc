"""The autoload hook: names for TORCH_LOGS, and never a failed ``import torch``."""

import importlib.util
import logging
import os
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from dynamo_dist import autoload
from dynamo_dist.diagnostics import live
from inductor_passes.report import logs as passes_logs

INSTALLED = any(p.name == "dynamo_dist" for p in metadata.entry_points(group="torch.backends"))


@pytest.fixture
def registered(monkeypatch):
    """The calls of ``register_log``, with TORCH_LOGS unread unless a test says otherwise."""
    from torch._logging import _internal

    calls = {}
    monkeypatch.setattr(
        _internal, "register_log", lambda alias, names: calls.update({alias: names})
    )
    monkeypatch.setattr(
        _internal,
        "register_artifact",
        lambda name, description, visible: calls.update({name: description}),
    )
    monkeypatch.setattr(autoload, "log_names_are_in_time", lambda internal: True)
    return calls


def test_names_are_registered(registered):
    autoload.register_log_names()
    assert registered == {**autoload.LOG_NAMES, **autoload.ARTIFACTS}
    assert registered["dist"] == ["dynamo_dist", "inductor_passes"]


def test_every_artifact_has_a_module():
    assert autoload.ARTIFACTS.keys() == {*passes_logs.modules(), *live.MODULES}
    for module in (*passes_logs.modules().values(), *live.MODULES.values()):
        assert importlib.util.find_spec(module) is not None


def test_late_names_are_not_registered(registered, monkeypatch):
    monkeypatch.setattr(autoload, "log_names_are_in_time", lambda internal: False)
    autoload.register_log_names()
    assert registered == {}


def test_names_are_late_once_torch_has_its_handler(monkeypatch):
    logger = logging.getLogger("torch")
    of_torch, of_user = logging.NullHandler(), logging.NullHandler()
    internal = SimpleNamespace(_is_torch_handler=lambda handler: handler is of_torch)
    monkeypatch.setattr(logger, "handlers", [of_user])
    assert autoload.log_names_are_in_time(internal)
    monkeypatch.setattr(logger, "handlers", [of_user, of_torch])
    assert not autoload.log_names_are_in_time(internal)


def test_a_fault_is_swallowed(registered, monkeypatch, caplog):
    def fail(internal):
        raise RuntimeError("injected")

    monkeypatch.setattr(autoload, "log_names_are_in_time", fail)
    with caplog.at_level(logging.DEBUG, "dynamo_dist.autoload"):
        autoload.register_log_names()
    assert registered == {}
    assert "RuntimeError('injected')" in caplog.text


def import_torch(code, **env):
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="the entry point is known to an installed package only")
def test_import_torch_survives_a_fault_in_the_hook():
    code = """
import dynamo_dist.autoload
def fail(internal):
    print("injected")
    raise KeyError
dynamo_dist.autoload.log_names_are_in_time = fail
import torch
print(torch.ones(1).item())
"""
    done = import_torch(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["injected", "1.0"]


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="short names need an install")
def test_short_name_in_torch_logs():
    code = """
import logging
import torch
for name in ("dynamo_dist.activation", "inductor_passes.pipeline"):
    logging.getLogger(name).debug("seen %s", name)
"""
    done = import_torch(code, TORCH_LOGS="+dist")
    assert done.returncode == 0, done.stderr
    assert "seen dynamo_dist.activation" in done.stderr
    assert "seen inductor_passes.pipeline" in done.stderr
