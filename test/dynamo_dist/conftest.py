"""What the tests of this folder share."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dynamo_dist
from dynamo_dist.testing import fake_mesh

TABLES = Path(__file__).parent / "torch_tables.py"


@pytest.fixture(scope="session")
def torch_tables():
    return SimpleNamespace(**runpy.run_path(str(TABLES)))


@pytest.fixture(autouse=True)
def upstream_again():
    """Each test starts and ends with upstream torch and nothing compiled."""
    dynamo_dist.disable()
    torch.compiler.reset()
    yield
    dynamo_dist.disable()
    torch.compiler.reset()


@pytest.fixture
def mesh():
    """A mesh of 2 x 4 fake ranks, dimensions ``dp`` and ``tp``, seen from rank 0."""
    with fake_mesh(2, 4, names=("dp", "tp")) as made:
        yield made


@pytest.fixture
def compiled():
    """``compiled(fn)``: ``fn`` in one graph, and the list that grows by one at each compile."""

    def compile_counting(fn, fullgraph=True):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        return torch.compile(fn, backend=backend, fullgraph=fullgraph), graphs

    return compile_counting


@pytest.fixture
def enabled():
    with dynamo_dist.enabled():
        yield
