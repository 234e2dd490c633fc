"""Which package may know of which."""

import ast
from pathlib import Path

import inductor_passes

ROOT = Path(inductor_passes.__file__).parent.parent
PRIVATE = (
    "torch._dynamo",
    "torch._inductor",
    "torch._functorch",
    "torch._library",
    "torch._guards",
)


def imported_modules(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    return files


def test_inductor_passes_never_imports_dynamo_dist():
    for path in sources("inductor_passes"):
        found = [m for m in imported_modules(path) if m.split(".")[0] == "dynamo_dist"]
        assert not found, (path, found)


def test_dynamo_dist_meets_inductor_passes_in_few_places():
    allowed = (
        "backend.py",
        "doctor.py",
        "reporting",
        "sharding/plan",
        "comparing",
        "explaining",
        "plugins.py",
        "errors.py",
        "config.py",
        "runtime/recompiles.py",
    )
    for path in sources("dynamo_dist"):
        relative = path.relative_to(ROOT / "dynamo_dist").as_posix()
        found = [m for m in imported_modules(path) if m.split(".")[0] == "inductor_passes"]
        assert not found or relative.startswith(allowed), (relative, found)


def test_private_torch_names_live_in_one_file_a_package():
    for package in ("inductor_passes", "dynamo_dist"):
        for path in sources(package):
            if path.name != "_torch.py":
                found = [m for m in imported_modules(path) if m.startswith(PRIVATE)]
                assert not found, (path, found)
