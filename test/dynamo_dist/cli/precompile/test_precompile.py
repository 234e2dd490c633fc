"""``precompile`` without a compile: which ranks, what it says of a rank that fails, how a script ends."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist.__main__ import main
from dynamo_dist.cli.precompile import command, rank
from dynamo_dist.errors import ArtefactError
from dynamo_dist.job import agreement, votes
from dynamo_dist.saved import ahead, saving
from dynamo_dist.saved.manifest import Artefacts
from inductor_passes.torch_compat import fake_groups


@pytest.fixture
def written(monkeypatch):
    """Folders that were saved to, in place of artefacts."""
    found = []

    def keep(path):
        found.append(path)
        return Artefacts(str(path), 2, 7, 100)

    monkeypatch.setattr(saving, "written", keep)
    return found


def ran(tmp_path, monkeypatch, text, steps=2):
    script = tmp_path / "train.py"
    script.write_text(text)
    task = rank.Task(str(script), ("3",), False, 1, 4, 2, steps, "artefacts", "")
    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("sys.path", [])
    return rank.run(task)


STEPS = """
import sys, torch
x = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([x])
for i in range(int(sys.argv[1])):
    optimizer.step()
    made = i + 1
    open(sys.argv[0] + ".steps", "w").write(str(made))
"""


@pytest.mark.parametrize(("steps", "made"), [(2, 1), (5, 3), (0, 3)])
def test_a_script_ends_after_so_many_steps_or_at_its_end(
    tmp_path, monkeypatch, written, steps, made
):
    numbers = torch.utils.hooks.RemovableHandle.next_id
    assert ran(tmp_path, monkeypatch, STEPS, steps).entries == 7
    assert written == ["artefacts"]
    assert int((tmp_path / "train.py.steps").read_text()) == made
    assert torch.utils.hooks.RemovableHandle.next_id == numbers


def test_a_script_ends_where_it_saves_and_loads_nothing(tmp_path, monkeypatch, written):
    text = """
import dynamo_dist
assert dynamo_dist.load("nowhere").entries == 0
dynamo_dist.save("its own folder")
raise AssertionError("beyond save()")
"""
    assert ran(tmp_path, monkeypatch, text).graphs == 2
    assert written == ["artefacts"] and ahead.folder() is None


def test_exit_codes_count(tmp_path, monkeypatch, written):
    assert ran(tmp_path, monkeypatch, "raise SystemExit(0)").graphs == 2
    with pytest.raises(SystemExit):
        ran(tmp_path, monkeypatch, "raise SystemExit(3)")
    assert written == ["artefacts"]


def test_a_rank_has_the_variables_of_a_launcher(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    variables = rank.Task("s", (), False, 5, 8, 4, 0, "", "").environment()
    wanted = {"RANK": "5", "LOCAL_RANK": "1", "GROUP_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert wanted.items() <= variables.items() and variables["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert rank.Task("s", (), False, 5, 8, 4, 0, "", "").environment()["OMP_NUM_THREADS"] == "6"


def test_ranks_are_chosen():
    assert command.chosen_ranks(3, "", 0) == [0, 1, 2]
    assert command.chosen_ranks(8, "7,0,7", 4) == [0, 7]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("0",), "less than 1"),
        (("4", "--ranks", "4"), "--ranks has 4; ranks are 0 to 3"),
        (("4", "--ranks", "a"), "is no list of ranks"),
        (("4", "--ranks-per-node", "3"), "does not divide"),
        (("4",), "There is no script"),
    ],
)
def test_what_does_not_fit_is_said(tmp_path, capsys, given, says):
    arguments = ["--json", "--world-size", *given, "--out", str(tmp_path), "none.py"]
    assert main(["precompile", *arguments]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]


def test_a_rank_that_fails_is_named_with_its_last_lines(tmp_path, capsys):
    script = Path(tmp_path, "fails.py")
    script.write_text("import torch.distributed as d\nd.init_process_group('gloo')\n1 / 0\n")
    arguments = ["precompile", "--world-size", "2", "--ranks", "1", "--out", str(tmp_path / "out")]
    assert main([*arguments, str(script)]) == 1
    said = capsys.readouterr().err
    assert "Rank 1 of 2 saved nothing: its script ended with 1" in said
    assert "ZeroDivisionError" in said and "fails.py" in said
    script.write_text("import os\nos._exit(0)\n")
    assert main([*arguments, str(script)]) == 1
    assert "ended its process by itself" in capsys.readouterr().err


def test_a_script_without_a_job_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ArtefactError, match="has no process group yet"):
        ran(tmp_path, monkeypatch, "pass")


def test_ranks_that_vote_find_their_peers_alike(caplog):
    """FSDP2's modules are traced whole only if all of their ranks can."""
    with fake_groups.standing_in(4, 2):
        dist.init_process_group("gloo")
        try:
            assert votes.all_can("one", [2, 3], True, 30.0)
            assert not votes.all_can("other", [2, 3], False, 30.0)
            agreement.check_agreement("sizes", {dist.group.WORLD.group_name: ["8"]}, 30.0, None)
        finally:
            dist.destroy_process_group()
    assert not caplog.messages


def test_save_is_its_own_elsewhere(written):
    assert dynamo_dist.save("here").entries == 7 and written == ["here"]
