"""Every break of this package has a cause of its own in the catalog, and a fix that is code."""

import ast
from pathlib import Path

import pytest

import dynamo_dist
from dynamo_dist.diagnostics.breaks import BreakMessage, advise
from dynamo_dist.diagnostics.own_break_causes import OWN

SOURCES = Path(dynamo_dist.__file__).parent


def kinds():
    """The first argument of each call of ``graph_break``, the fourth of ``traced_apart``; names
    looked up.
    """
    found = set()
    for path in SOURCES.rglob("*.py"):
        tree = ast.parse(path.read_text())
        named = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                at = {"graph_break": 0, "traced_apart": 3}.get(called)
                value = None if at is None else node.args[at]
                value = named.get(value.id) if isinstance(value, ast.Name) else value
                if isinstance(value, ast.Constant):
                    found.add(value.value)
    return sorted(found)


def is_code(text):
    lines = [
        line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")
    ]
    ast.parse(text)
    return bool(lines)


def test_there_are_breaks_to_look_at():
    assert len(kinds()) >= 12


@pytest.mark.parametrize("kind", kinds())
def test_each_has_a_cause_and_a_fix_that_is_code(kind):
    advice = advise(BreakMessage(kind=kind, explanation="", context="torch.distributed.send"))
    assert advice.cause in {cause.name for cause in OWN}
    assert advice.why
    assert "$" not in advice.why + advice.fix
    assert is_code(advice.fix)
