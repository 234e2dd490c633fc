import json

from inductor_passes.__main__ import main
from inductor_passes.cli import kernels as listing
from inductor_passes.kernels import availability
from inductor_passes.registry import registered_passes


def test_every_kernel_is_listed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(listing, "why_not_here", lambda: "there is no CUDA device")
    assert main(["kernels", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["why_not"] == "there is no CUDA device"
    assert not any(row["runs"] for row in printed["kernels"])
    assert main(["kernels"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("reduce_chunks", "needs", "no CUDA"))


def test_without_peers_only_the_kernel_that_meets_none_runs(capsys, monkeypatch):
    monkeypatch.setattr(listing, "why_not_here", lambda: "devices 0 and 1 have no peer access")
    main(["kernels", "--json"])
    rows = json.loads(capsys.readouterr().out)["kernels"]
    assert [row["name"] for row in rows if row["runs"]] == ["reduce_chunks"]


def test_the_list_agrees_with_the_passes():
    named = {row.fused_by for row in listing.KERNELS if row.fused_by}
    assert named == {name for name in registered_passes() if name.startswith("fuse_")}


def test_nothing_needs_triton_to_be_listed(monkeypatch, capsys):
    monkeypatch.setattr(availability, "is_installed", lambda: False)
    monkeypatch.setattr(listing, "is_installed", lambda: False)
    main(["kernels", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert printed["triton"] is None
    assert "not installed" in printed["why_not"]


def test_names_stand_whole_in_any_width(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    main(["kernels"])
    told = capsys.readouterr().out.splitlines()
    assert {row.name for row in listing.KERNELS} == {
        line for line in told if not line.startswith(" ")
    }
