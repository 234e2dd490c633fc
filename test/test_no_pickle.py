"""Nothing that a user may pass around is read as pickle, which runs what it holds.

What ranks of one job hand to each other through its store are: entries of torch's compile caches.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    p for name in ("dynamo_dist", "inductor_passes") for p in (ROOT / name).rglob("*.py")
)
ENTRIES = "inductor_passes/torch_compat/caches.py"
MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def unpickles(source):
    """The lines that import a module which unpickles, or load a tensor file as pickle."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        if any(name.split(".")[0] in MODULES for name in names):
            yield node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            ("torch.load", "np.load")
        ):
            safe = {"weights_only": True, "allow_pickle": False}
            given = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
            if not any(given.get(name) is value for name, value in safe.items()):
                yield node.lineno


def test_no_source_reads_pickle():
    found = {
        path.relative_to(ROOT).as_posix() for path in SOURCES if list(unpickles(path.read_text()))
    }
    assert found == {ENTRIES}


def test_entries_are_read_where_ranks_share_a_compile_alone():
    read = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if "put_own_entry(" in path.read_text()
    }
    assert read - {ENTRIES} == {"inductor_passes/inductor/shared_trace.py"}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load(f)",
        "torch.load(f, weights_only=False)",
    ],
)
def test_it_would_be_seen(source):
    assert list(unpickles(source))


def test_weights_alone_are_fine():
    assert not list(unpickles("torch.load(f, weights_only=True)"))


def test_torch_gets_no_pickles_from_us():
    words = "populate_cache", "load_cache_artifacts", "_write_to_local_cache"
    assert not [p for p in SOURCES if any(word in p.read_text() for word in words)]
