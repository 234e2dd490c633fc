"""What the docs list is what there is."""

import argparse
import re
import tomllib
from pathlib import Path

import inductor_passes
from dynamo_dist import autoload, plugins
from dynamo_dist.cli import explain
from dynamo_dist.diagnostics import live
from dynamo_dist.sharding import register_rows, register_strategy
from dynamo_dist.trackers import trace_instead
from inductor_passes.plugins import OFF
from inductor_passes.registry import PLUGIN_GROUP
from inductor_passes.report import logs as passes_logs
from inductor_passes.report.figures import WHY_EXPOSED

DOCS = Path(__file__).parents[2] / "docs"
REPORT = (DOCS / "reference" / "report.md").read_text()
LOGS = (DOCS / "reference" / "logs.md").read_text()
PLUGINS = (DOCS / "how-to" / "own-package.md").read_text()


def rows(text, first):
    """The cells of each row of the table whose header has ``first`` in its first cell."""
    (table,) = [t for t in re.findall(r"(?:^\|.*\n)+", text, re.M) if first in t.split("\n")[0]]
    return [
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[2:]
    ]


def test_options_of_explain():
    parser = argparse.ArgumentParser(add_help=False)
    explain.add_arguments(parser)
    known = {o for action in parser._actions for o in action.option_strings}
    assert {re.match(r"`(-\S+?)[ `]", row[0])[1] for row in rows(REPORT, "option")} == known


def test_reasons():
    found = {row[0].strip("`"): row[1] for row in rows(REPORT, "an exposed collective is")}
    assert found.keys() == WHY_EXPOSED.keys()
    assert all(found[name].startswith(text) for name, text in WHY_EXPOSED.items())


def test_names_of_logs():
    found = {row[0].strip("`"): row[2].strip("`") for row in rows(LOGS, "TORCH_LOGS")}
    modules = {**passes_logs.modules(), **live.MODULES}
    assert found.pop("+dist") == ",".join(f"+{name}" for name in autoload.LOG_NAMES["dist"])
    assert found == {artifact: f"+{module}" for artifact, module in modules.items()}


def test_plugins():
    project = tomllib.loads((DOCS / "example_plugin" / "pyproject.toml").read_text())["project"]
    assert project["entry-points"].keys() == {PLUGIN_GROUP, plugins.GROUP}
    for group, entries in project["entry-points"].items():
        for name, value in entries.items():
            assert f'[project.entry-points."{group}"]\n{name} = "{value}"' in PLUGINS
    for function in (
        inductor_passes.register,
        inductor_passes.register_topology,
        register_rows,
        register_strategy,
        trace_instead,
    ):
        assert f".{function.__name__}(" in PLUGINS
    assert f"{OFF}=example" in PLUGINS
