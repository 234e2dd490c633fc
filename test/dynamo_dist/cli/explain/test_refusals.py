"""What ``explain`` cannot start, and what it prints without starting anything."""

import argparse
import json

import pytest

from dynamo_dist.cli import explain, explained_process
from dynamo_dist.diagnostics.records import json_schema


def parsed(*arguments):
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    return parser.parse_args(arguments)


def test_there_is_no_such_script(capsys):
    assert explain.run(parsed("no_such.py")) == 2
    assert capsys.readouterr().err == "error: There is no script 'no_such.py'.\n"


def test_torch_loads_no_extension(monkeypatch, capsys):
    monkeypatch.setattr(explain.importlib.metadata, "entry_points", lambda **which: ("ours",))
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert explain.run(parsed(__file__)) == 2
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD is off" in capsys.readouterr().err


def test_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(explain.importlib.metadata, "entry_points", lambda **which: ())
    assert explain.run(parsed(__file__)) == 2
    assert "dynamo-dist is not installed" in capsys.readouterr().err


def test_json_is_on_standard_output(capsys):
    assert explain.run(parsed("--json", "no_such.py")) == 2
    assert json.loads(capsys.readouterr().out) == {"error": "There is no script 'no_such.py'."}


def test_the_script_s_status_is_kept_where_no_report_can_be_made(monkeypatch, tmp_path, capsys):
    def fail(*args):
        raise KeyError("no journal")

    monkeypatch.setattr(explain.importlib.metadata, "entry_points", lambda **which: ("ours",))
    monkeypatch.setattr(explained_process, "read", fail)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(5)")
    assert explain.run(parsed(str(script))) == 5
    assert capsys.readouterr().err == "error: there is no report: KeyError: 'no journal'\n"


def test_what_follows_the_script_is_the_script_s():
    arguments = parsed("--html", "out.html", "train.py", "--json", "-m")
    assert (arguments.json, arguments.html, arguments.is_module) == (False, "out.html", False)
    assert arguments.arguments == ["--json", "-m"]


def test_the_schema_is_printed(capsys):
    with pytest.raises(SystemExit) as ended:
        parsed("--schema")
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out) == json_schema()
