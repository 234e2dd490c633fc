"""``python -m dynamo_dist doctor``: the object it prints and its exit status."""

import json
import platform

import pytest
import torch

import dynamo_dist
from dynamo_dist import __main__
from dynamo_dist.cli import doctor
from inductor_passes.fused.kernels import availability


def test_json_is_the_documented_object(capsys):
    assert __main__.main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == [
        "supported",
        "enabled",
        "versions",
        "probes",
        "trackers",
        "passes",
        "degraded",
    ]
    assert printed["supported"] is True
    assert printed["enabled"] is False
    assert printed["versions"]["torch"] == torch.__version__
    assert printed["versions"]["python"] == platform.python_version()
    assert {p["name"] for p in printed["probes"]} == set(doctor.PROBE_MEANINGS)
    assert printed["trackers"] == ["process_group", "device_mesh", "placement"]
    assert {"merge_tiny", "schedule"} <= set(printed["passes"])


def test_text_names_versions_probes_and_what_is_degraded(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert __main__.main(["doctor"]) == 0
    text = capsys.readouterr().out
    diagnosis = doctor.diagnose()
    assert f"torch {torch.__version__} is supported" in text
    assert all(probe.name in text for probe in diagnosis.probes)
    assert all(problem.what in text for problem in diagnosis.degraded)


def test_doctor_names_an_unsupported_torch_and_fails(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", "2.10.0")
    assert __main__.main(["doctor", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["supported"] is False
    assert printed["probes"] == printed["trackers"] == printed["passes"] == []
    assert printed["degraded"] == [
        {
            "what": "everything",
            "why": "torch 2.10.0 is not supported; torch 2.13 to 2.15 are.",
            "fix": "Install a supported torch.",
        }
    ]
    assert __main__.main(["doctor"]) == 1
    assert "torch 2.10.0 is NOT supported" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("absent", "what"),
    [
        ("_has_accelerator", "GPU kernels and measured GPU times"),
        ("_is_installed", 'torch.compile(backend="dynamo_dist") by name'),
    ],
)
def test_what_is_absent_is_degraded(monkeypatch, absent, what):
    monkeypatch.setattr(doctor, absent, lambda: True)
    assert what not in [problem.what for problem in doctor.diagnose().degraded]
    monkeypatch.setattr(doctor, absent, lambda: False)
    assert what in [problem.what for problem in doctor.diagnose().degraded]


def test_without_triton_fusing_is_off(monkeypatch):
    monkeypatch.setattr(availability, "is_installed", lambda: False)
    diagnosis = doctor.diagnose()
    (problem,) = [p for p in diagnosis.degraded if p.what == "fusing of collectives into kernels"]
    assert problem.why == "triton is not installed."


def test_trackers_that_are_off_and_names_that_are_wrong(monkeypatch):
    monkeypatch.setenv("DYNAMO_DIST_TRACKERS_OFF", "placement")
    diagnosis = doctor.diagnose()
    assert diagnosis.trackers == ("process_group", "device_mesh")
    assert "tracker placement" in [problem.what for problem in diagnosis.degraded]
    monkeypatch.setenv("DYNAMO_DIST_TRACKERS_OFF", "nope")
    assert doctor.diagnose().degraded[0].what == "enable()"


def test_enabled_is_told():
    with dynamo_dist.enabled():
        assert doctor.diagnose().enabled


def test_a_bad_command_line_exits_with_2(capsys):
    with pytest.raises(SystemExit) as caught:
        __main__.main(["nope"])
    assert caught.value.code == 2
    assert "doctor" in capsys.readouterr().err
