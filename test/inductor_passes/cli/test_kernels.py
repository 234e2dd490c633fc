import inspect
import json
import re
import sys
from pathlib import Path

from inductor_passes.__main__ import main
from inductor_passes.fused import FUSIONS, feature, kernels
from inductor_passes.fused.kernels import availability


def test_every_kernel_is_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(feature.availability, "why_not_here", lambda: "there is no CUDA device")
    assert main(["kernels", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["why_not"] == "there is no CUDA device"
    assert not any(row["runs"] for row in printed["kernels"])
    assert main(["kernels"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("all_gather_matmul", "needs", "no CUDA"))


def test_all_run_where_nothing_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(feature.availability, "why_not_here", lambda: "")
    main(["kernels", "--json"])
    assert all(row["runs"] for row in json.loads(capsys.readouterr().out)["kernels"])


def test_each_is_emitted_by_a_pass_and_there_is_no_other():
    emitters = {pass_.name: sys.modules[pass_.__module__] for pass_ in FUSIONS}
    for row in feature.KERNELS:
        assert re.search(rf"\.{row.name}\b", inspect.getsource(emitters[row.fused_by])), row.name
    assert {row.fused_by for row in feature.KERNELS} == emitters.keys()
    sources = "".join(path.read_text() for path in Path(kernels.__file__).parent.glob("*.py"))
    operators = re.findall(r'custom_op\("inductor_passes::(\w+)"', sources)
    assert sorted(operators) == sorted(row.name for row in feature.KERNELS)


def test_nothing_needs_triton_to_be_listed(monkeypatch, capsys):
    monkeypatch.setattr(availability, "is_installed", lambda: False)
    monkeypatch.setattr(feature.availability, "is_installed", lambda: False)
    main(["kernels", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["triton"] is None
    assert "not installed" in printed["why_not"]


def test_names_stand_whole_in_any_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    main(["kernels"])
    told = capsys.readouterr().out.splitlines()
    assert {row.name for row in feature.KERNELS} == {
        line for line in told if not line.startswith(" ")
    }
