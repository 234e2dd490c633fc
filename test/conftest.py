"""What all tests share: programs on real ranks."""

import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from torch._inductor import cpu_vec_isa
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import fresh_cache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))
import preloaded  # noqa: E402 - tools are no package

# A first call that imports, on a loaded machine, says nothing of the property.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

KEPT = 3000  # characters from either end of what the ranks said


@pytest.fixture
def on_ranks(tmp_path):
    """``on_ranks(worker, ranks)``: the script on that many gloo ranks, each of which must end well.

    Ranks are forked with torch imported, some seconds sooner than ``torchrun``'s. Compiled code goes to a folder
    of the test's own. A rank that fails fails the test, with what all said first and last.
    """

    def run(worker, ranks, *arguments, timeout=900):
        well, said = preloaded.run_ranks(
            worker,
            ranks,
            [*map(str, arguments)],
            {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")},
            folder=tmp_path,
            timeout_s=timeout,
        )
        assert well, shortened(said)

    return run


@pytest.fixture
def torchrun(tmp_path):
    """``torchrun(worker, ranks)``: the same as users start it."""

    def run(worker, ranks, *arguments, timeout=900, cwd=None):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        done = subprocess.run(
            [*command, f"--nproc-per-node={ranks}", str(worker), *map(str, arguments)],
            env={**os.environ, **variables},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, shortened(done.stdout + done.stderr)
        return done

    return run


def shortened(said):
    return said if len(said) <= 2 * KEPT else f"{said[:KEPT]}\n[...]\n{said[-KEPT:]}"


@pytest.fixture
def without_kernels(monkeypatch):
    """Inductor as it is, but its C++ is not built and computes nothing: seconds less a program.

    Lowering, scheduling and the generated code run, so launches are made; numbers mean nothing.
    """
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_, **__: lambda *_: None)
    # Else programs are built to ask for the processor's widest vectors.
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", list)
    with fresh_cache():
        yield
