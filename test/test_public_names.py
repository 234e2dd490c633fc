"""Names that users have: those in ``public_names.json`` are there, and a change that takes one away
edits that file.

The file lists what README and docs/ name, what the packages export and what commands take.
"""

import argparse
import importlib
import json
from pathlib import Path

import pytest

import dynamo_dist.__main__
import inductor_passes.__main__
from dynamo_dist.graph_compile import register_options
from inductor_passes import registered_passes
from inductor_passes.pass_options import own_keys

ROOT = Path(__file__).parents[1]
KEPT = json.loads(Path(__file__).with_name("public_names.json").read_text())


def find(name):
    """The object of a dotted name: the longest part that is a module, then attributes."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def takes(parser):
    """Commands, nested, with the options of the innermost."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return {name: takes(command) for name, command in action.choices.items()}
    return [option for action in parser._actions for option in action.option_strings]


@pytest.mark.parametrize("name", KEPT["names"])
def test_python_names(name):
    assert find(name) is not None


def missing(kept, now):
    if isinstance(kept, list):
        return [name for name in kept if name not in now]
    return [
        f"{name} {rest}" if rest else name
        for name, inner in kept.items()
        for rest in (missing(inner, now[name]) if name in now else [""])
    ]


def test_commands():
    now = {
        "dynamo_dist": takes(dynamo_dist.__main__.parser()),
        "inductor_passes": takes(inductor_passes.__main__.parser()),
    }
    assert missing(KEPT["commands"], now) == []
    assert missing({"dynamo_dist": {"gone": ["-x"], "report": ["--no"]}}, now) == [
        "dynamo_dist gone",
        "dynamo_dist report --no",
    ]


def test_options_and_passes():
    register_options()
    assert missing(KEPT["options"], own_keys()) == []
    assert missing(KEPT["passes"], registered_passes()) == []


@pytest.mark.parametrize("kind", ["variables", "logs", "entry_point_groups"])
def test_what_is_named_by_a_string(kind):
    sources = "\n".join(
        path.read_text()
        for package in ("dynamo_dist", "inductor_passes")
        for path in (ROOT / package).rglob("*.py")
    )
    assert [name for name in KEPT[kind] if f'"{name}"' not in sources] == []
