"""Write docs/reference/structure.md: the layers of both packages and which imports which, from the
sources.

    python tools/docs/structure.py           # write it
    python tools/docs/structure.py --check   # exit with 1 if it differs, or if layers form a cycle

A layer is a folder, or a module that stands beside the folders. Arrows that follow from others are
left out.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "structure.md"
PACKAGES = ("inductor_passes", "dynamo_dist")


def module_name(path: Path) -> str:
    """Dotted name of a source file under ROOT."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> dict[str, ast.Module]:
    """Every module of both packages, parsed."""
    paths = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {module_name(path): ast.parse(path.read_text()) for path in paths}


def is_for_types(node: ast.AST) -> bool:
    """Return whether a node is an ``if TYPE_CHECKING:``, which imports nothing when the program
    runs.
    """
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def imports(tree: ast.AST, known: dict[str, ast.Module]) -> Iterator[str]:
    """Modules of ours that a source imports, at the top or inside a function."""
    for node in ast.iter_child_nodes(tree):
        if is_for_types(node):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module in known:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        yield from imports(node, known)


def unit_of(module: str, depth: int) -> str:
    """The unit of a module: its folder, cut at ``depth`` parts; itself, beside the folders."""
    parts = module.split(".")
    is_folder = (ROOT / Path(*parts)).is_dir()
    folder = parts if is_folder or len(parts) <= 2 else parts[:-1]
    return ".".join(folder[:depth])


def imports_between(depth: int, modules: dict[str, ast.Module] | None = None) -> nx.DiGraph:
    """Layers and the imports between them; an arrow keeps the two modules that made it."""
    modules = sources() if modules is None else modules
    graph = nx.DiGraph()
    for module, tree in modules.items():
        unit = unit_of(module, depth)
        graph.add_node(unit)
        for other in imports(tree, modules):
            target = unit_of(other, depth)
            # The package itself only hands on names, lazily.
            if target != unit and "." in unit and "." in target:
                graph.add_edge(unit, target, modules=(module, other))
    return graph


def cycles(graph: nx.DiGraph) -> list[list[str]]:
    """Arrows of each cycle of units, as "module imports module"; none if all is well."""
    return [
        [
            "{} imports {}".format(*data["modules"])
            for a, b, data in graph.edges(data=True)
            if a in found and b in found
        ]
        for found in nx.strongly_connected_components(graph)
        if len(found) > 1
    ]


def layers(graph: nx.DiGraph) -> list[list[str]]:
    """Layers by height: the first import no other, each later one only those before it."""
    return [sorted(layer) for layer in nx.topological_generations(graph.reverse())]


def summary(unit: str) -> str:
    """First sentence of the unit's docstring, on one line."""
    path = ROOT / Path(*unit.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    doc = ast.get_docstring(ast.parse(source.read_text())) or ""
    return " ".join(doc.split("\n\n")[0].split()).rstrip(".")


def compile_steps() -> list[tuple[str, str]]:
    """Steps of one compile, from the docstring of its session: each indented line's name, and the
    line itself.
    """
    source = ROOT / "inductor_passes" / "inductor" / "session.py"
    doc = ast.get_docstring(ast.parse(source.read_text())) or ""
    lines = doc.split("::\n\n")[1].split("\n")
    return [(line.split()[0], line.removeprefix("    ")) for line in lines if line.strip()]


def render() -> str:
    """The page."""
    graph = imports_between(depth=2)
    lines = [
        "# Structure",
        "",
        "`python tools/docs/structure.py` writes this page from the imports of the sources. A test",
        "fails on an import upwards, on a cycle, and when this page differs from the code.",
        "",
        "A layer imports only layers above it in these tables. `dynamo_dist` imports",
        "`inductor_passes`, never the other way round. Imports that follow from others are left",
        "out.",
        "",
        "## One compile",
        "",
        "`inductor_passes/inductor/session.py` is the driver. Indented below a step are the steps",
        "for which torch calls back:",
        "",
        "```text",
        *(line for _, line in compile_steps()),
        "```",
    ]
    for package in PACKAGES:
        own = graph.subgraph(unit for unit in graph if unit.startswith(package + "."))
        direct = nx.transitive_reduction(own)
        lines += [
            "",
            f"## {package}",
            "",
            "| layer | what it is | imports |",
            "| --- | --- | --- |",
        ]
        for unit in (unit for layer in layers(own) for unit in layer):
            below = ", ".join(sorted(short(other) for other in direct.successors(unit)))
            lines.append(f"| `{short(unit)}` | {summary(unit)} | {below} |")
    return "\n".join(lines) + "\n"


def short(unit: str) -> str:
    """A unit's name within its package."""
    return unit.partition(".")[2]


def main() -> int:
    """Write the page, or check it; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    for depth in (2, 3):
        for found in cycles(imports_between(depth)):
            print("layers import each other:", *found, sep="\n  ", file=sys.stderr)
            return 1
    if arguments.check:
        if PAGE.read_text() == render():
            return 0
        print(f"{PAGE} is not what the code says: run this script without --check", file=sys.stderr)
        return 1
    PAGE.write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
