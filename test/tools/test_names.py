"""What tools call of the packages is there: they are run by hand, some of them rarely, and no
test runs them all.
"""

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("dynamo_dist", "inductor_passes")
FILES = sorted(
    file.relative_to(ROOT)
    for folder in ("tools", "test/support")
    for file in (ROOT / folder).rglob("*.py")
    if any(name in file.read_text() for name in PACKAGES)
)


def missing(source):
    """Names that a file imports from the packages, or asks their modules for, and that are not
    there.
    """
    tree, modules, found = ast.parse(source), {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] in PACKAGES:
                    importlib.import_module(each.name)
                    name = each.asname or each.name.split(".")[0]
                    modules[name] = importlib.import_module(each.name if each.asname else name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
            owner = importlib.import_module(node.module)
            for each in node.names:
                value = _member(owner, each.name)
                if value is None:
                    found.append(f"{node.module}.{each.name}")
                elif isinstance(value, ModuleType):
                    modules[each.asname or each.name] = value
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (owner := _module(node.value, modules)) is not None:
            if _member(owner, node.attr) is None:
                found.append(f"{owner.__name__}.{node.attr}")
    return sorted(set(found))


def _module(node, modules):
    """The module of ours that an expression is, or None."""
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and (owner := _module(node.value, modules)) is not None:
        value = _member(owner, node.attr)
        ours = isinstance(value, ModuleType) and value.__name__.split(".")[0] in PACKAGES
        return value if ours else None
    return None


def _member(owner, name):
    """A name that is bound to None counts as there."""
    if hasattr(owner, name):
        return getattr(owner, name) or True
    try:
        return importlib.import_module(f"{owner.__name__}.{name}")
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("file", FILES, ids=str)
def test_names_are_there(file):
    assert missing((ROOT / file).read_text()) == []


def test_a_name_that_has_gone_is_found():
    assert missing(
        "from dynamo_dist.planning import repair\n"
        "from inductor_passes.graph import no_such\n"
        "repair.file.save_plan\nrepair.file.saved\nrepair.fingerprint.anything\n"
    ) == ["dynamo_dist.planning.file.saved", "inductor_passes.graph.no_such"]
