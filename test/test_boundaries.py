"""Which package may know of which."""

import ast
import collections
import runpy
from pathlib import Path

import pytest
import torch.distributed

import inductor_passes
from dynamo_dist import plugins
from inductor_passes import registry

ROOT = Path(inductor_passes.__file__).parent.parent
structure = runpy.run_path(str(Path(__file__).parents[1] / "tools" / "docs" / "structure.py"))
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
        "__main__.py",
        "backend.py",
        "tracing/eager_fallback.py",
        "numerics",
        "cli",
        "graph_compile.py",
        "settings.py",
        "errors.py",
        "inductor.py",
        "plugins.py",
        "diagnostics",
        "runtime/calls.py",  # what the compile in work wants
        "runtime/gradients.py",
        "tracing/operators.py",
        "planning",
        "sharding/registration.py",  # a hash of sources, as of plugins
        "torch_compat/aot_partition.py",  # the name of a mark that a pass reads
    )
    for path in sources("dynamo_dist"):
        relative = path.relative_to(ROOT / "dynamo_dist").as_posix()
        found = [m for m in imported_modules(path) if m.split(".")[0] == "inductor_passes"]
        assert not found or relative.startswith(allowed), relative


def test_private_torch_names_live_in_one_folder_a_package():
    for package in ("inductor_passes", "dynamo_dist"):
        for path in sources(package):
            if "torch_compat" not in path.parts:
                found = [m for m in imported_modules(path) if m.startswith(PRIVATE)]
                assert not found, (path, found)


FEATURES = (
    "inductor_passes.fused",
    "inductor_passes.memory",
    "inductor_passes.split",
    "dynamo_dist.planning",
)


def is_within(module, packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_features_are_those_that_the_packages_list():
    listed = [*registry.FEATURES, *plugins.FEATURES]
    folders = [each.module.rpartition(".")[0] for each in listed]
    assert sorted(folders) == sorted(FEATURES)


@pytest.mark.parametrize("package", ["inductor_passes", "dynamo_dist"])
def test_the_core_imports_no_feature(package):
    for path in sources(package):
        module = structure["module_name"](path)
        others = [name for name in FEATURES if not is_within(module, [name])]
        found = [each for each in imported_modules(path) if is_within(each, others)]
        assert not found, (module, found)


@pytest.mark.parametrize("depth", [2, 3])
def test_layers_do_not_import_each_other(depth):
    assert structure["cycles"](structure["imports_between"](depth)) == []


def test_a_cycle_of_layers_is_found_and_named():
    modules = {
        name: ast.parse(text)
        for name, text in {
            "inductor_passes.graph.printing": "from inductor_passes.cost.prices import us",
            "inductor_passes.cost.prices": "def f():\n    import inductor_passes.records",
            "inductor_passes.records": "from inductor_passes.graph.printing import dump",
        }.items()
    }
    ((*found,),) = structure["cycles"](structure["imports_between"](2, modules))
    assert sorted(found) == sorted(
        [
            "inductor_passes.graph.printing imports inductor_passes.cost.prices",
            "inductor_passes.cost.prices imports inductor_passes.records",
            "inductor_passes.records imports inductor_passes.graph.printing",
        ]
    )
    modules["inductor_passes.records"] = ast.parse(
        "if TYPE_CHECKING:\n    from inductor_passes.graph.printing import dump"
    )
    assert structure["cycles"](structure["imports_between"](2, modules)) == []


def test_each_step_of_a_compile_is_a_function_the_session_names():
    session = (ROOT / "inductor_passes" / "inductor" / "session.py").read_text()
    defined = {
        node.name
        for path in sources("inductor_passes")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    for step, _ in structure["compile_steps"]():
        assert set(step.split(".")) <= defined | {"compile_fx", "compile_fx_inner"}, step
    own = [step for step, _ in structure["compile_steps"]() if not step.startswith("Attachment")]
    body = session.partition("from __future__")[2]
    assert all(f"{step}(" in body or f".{step}" in body for step in own)


def test_the_structure_page_is_what_the_code_says():
    page = (ROOT / "docs" / "reference" / "structure.md").read_text()
    assert page == structure["render"](), "run python tools/docs/structure.py"


# Names that stand for one idea in many modules: what every command, kernel, rule or registry offers
# by that name.
OFFERED = {
    "add_arguments",
    "answer",
    "backward",
    "patches",
    "forward",
    "handler",
    "parse",
    "reference",
    "refuse",
    "run",
}


def defined(package, kinds):
    """Public names at the top of the package's modules, and the modules that define them."""
    found = collections.defaultdict(list)
    for path in sources(package):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


@pytest.mark.parametrize("package", ["inductor_passes", "dynamo_dist"])
def test_no_two_classes_have_one_name(package):
    assert {n: at for n, at in defined(package, ast.ClassDef).items() if len(at) > 1} == {}


@pytest.mark.parametrize("package", ["inductor_passes", "dynamo_dist"])
def test_no_two_functions_of_a_layer_have_one_name(package):
    alike = {}
    for name, at in defined(package, ast.FunctionDef).items():
        # Functions that stand in for torch's bear its names.
        if name in OFFERED or hasattr(torch.distributed, name):
            continue
        folders = collections.Counter(path.rpartition("/")[0] for path in at)
        if most := [folder for folder, count in folders.items() if count > 1]:
            alike[name] = most
    assert alike == {}
