"""Importing changes nothing in torch and costs nothing; public names load when they are used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import dynamo_dist

TABLES = Path(__file__).parent / "torch_tables.py"


def in_a_new_process(code):
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.strip().splitlines()[-1]


def test_public_names_load_when_used():
    assert dynamo_dist.__all__ == [
        "compare",
        "disable",
        "enable",
        "enabled",
        "explain",
        "is_enabled",
        "verify",
    ]
    assert all(callable(getattr(dynamo_dist, name)) for name in dynamo_dist.__all__)
    assert set(dynamo_dist.__all__) <= set(dir(dynamo_dist))
    with pytest.raises(AttributeError, match="module 'dynamo_dist' has no attribute 'nope'"):
        dynamo_dist.nope


def test_importing_imports_no_torch():
    code = "import sys, dynamo_dist, inductor_passes; print('torch' in sys.modules)"
    assert in_a_new_process(code) == "False"


@pytest.mark.slow
def test_enabling_loads_no_pass_and_not_all_of_inductor():
    code = (
        "import sys, torch, dynamo_dist; dynamo_dist.enable(); print(sorted(sys.modules.keys() & "
        "{'inductor_passes.registry', 'inductor_passes.schedule', 'dynamo_dist.planning', "
        "'torch._inductor.decomposition', 'torch._inductor.compile_fx'}))"
    )
    assert in_a_new_process(code) == "[]"


@pytest.mark.slow
def test_importing_changes_nothing_in_torch():
    code = f"""
import json, runpy
tables = runpy.run_path({str(TABLES)!r})
tables["settle"]()
before = tables["snapshot"]()
import dynamo_dist, inductor_passes
imported = tables["difference"](before, tables["snapshot"]())
dynamo_dist.enable
import dynamo_dist.backend, dynamo_dist.cli.doctor, dynamo_dist.torch_compat.dynamo_compiler, dynamo_dist.tracing.trackers
loaded = tables["difference"](before, tables["snapshot"]())
dynamo_dist.enable()
enabled = tables["difference"](before, tables["snapshot"]())
dynamo_dist.disable()
disabled = tables["difference"](before, tables["snapshot"]())
print(json.dumps([imported, loaded, len(enabled), disabled]))
"""
    imported, loaded, enabled, disabled = json.loads(in_a_new_process(code))
    assert imported == loaded == disabled == []
    assert enabled > 3  # the snapshot sees what enabling changes


def seconds_to_import(*names):
    """In a new process, the bytecode and the files' pages warm."""
    code = f"import time; start = time.process_time(); import {', '.join(names)}; print(time.process_time() - start)"
    return min(float(in_a_new_process(code)) for _ in range(2))


@pytest.mark.slow
def test_importing_costs_little_beside_torch():
    torch_alone = seconds_to_import("torch")
    assert seconds_to_import("dynamo_dist", "inductor_passes") < 1.3 * torch_alone
    hook = """
import torch, time
start = time.process_time()
import dynamo_dist.autoload
dynamo_dist.autoload.register_log_names()
print(time.process_time() - start)
"""
    assert float(in_a_new_process(hook)) < 0.03  # of every import of torch
