"""C++ kernels of a module are built together, found again each by itself, and built as by torch
where that fails.
"""

import itertools
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.utils import fresh_cache

from dynamo_dist.torch_compat import inductor_cpp

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"


def kernel(number, extra=""):
    body = f"out[0] = in[0] + {number}.0f;"
    return f'\n{HEADER}{extra}extern "C"  void  kernel(const float* in,\n    float* out)\n{{ {body} }}\n'


def module(*sources):
    """What a generated module does: ask for kernels, then wait for them."""
    wanted = AsyncCompile()
    scope = {
        f"cpp_{at}": wanted.cpp_pybinding(["const float*", "float*"], each)
        for at, each in enumerate(sources)
    }
    wanted.wait(scope)
    return [scope[f"cpp_{at}"] for at in range(len(sources))]


def values(functions):
    found = []
    for each in functions:
        out = torch.zeros(1)
        each(torch.ones(1), out)
        found.append(out.item())
    return found


@pytest.mark.parametrize(
    "source",
    [
        kernel(1, extra="#define SIZE 3\n"),
        kernel(1) + '#include "more.h"\n',
        kernel(1) + kernel(2),
        'extern "C" void kernel(float* out) {}',
        HEADER + 'extern "C" void other(float* out) {}',
    ],
)
def test_a_source_of_another_form_is_left_to_torch(source):
    assert inductor_cpp._parts(source) is None


def test_pragmas_and_helpers_are_part_of_a_kernel():
    source = kernel(1, extra="static int two() { return 2; }\n").replace(
        "out[0]", "\n#pragma omp parallel\nout[0]"
    )
    parts = inductor_cpp._parts(source)
    assert "two()" in parts["before"] and "#pragma omp" in parts["rest"]


def test_units_are_of_sixteen_kernels_at_most():
    kernels = {f"{each}": inductor_cpp.Kernel(("float*",), kernel(each)) for each in range(35)}
    batched = list(inductor_cpp._batched(kernels))
    assert [len(each) for each in batched] == [16, 16, 3]
    assert list(itertools.chain(*batched)) == list(kernels)


pytestmark_built = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="builds kernels with g++"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch, enabled):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with fresh_cache():
        yield Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])


def libraries(folder):
    return sorted(folder.glob("**/*.main.so"))


class TestBuilt:
    pytestmark = pytestmark_built

    def test_kernels_of_a_module_share_a_library(self, folder):
        assert values(module(kernel(1), kernel(2), kernel(1), kernel(3))) == [2.0, 3.0, 2.0, 4.0]
        assert len(libraries(folder)) == 1

    def test_only_what_is_not_there_is_built(self, folder):
        module(kernel(1), kernel(2))
        inductor_cpp._functions.clear()  # as another process
        before = inductor_cpp._cache().cache.copy()
        assert values(module(kernel(2))) == [3.0]
        assert inductor_cpp._cache().cache == before
        assert values(module(kernel(3), kernel(2), kernel(1))) == [4.0, 3.0, 2.0]
        assert len(libraries(folder)) == 2

    def test_a_unit_that_does_not_build_is_built_by_torch(self, folder, monkeypatch, caplog):
        def fails(*_, **__):
            raise RuntimeError("no space left\nat all")

        monkeypatch.setattr(inductor_cpp, "_function", fails)
        with caplog.at_level(logging.WARNING):
            assert values(module(kernel(1), kernel(2))) == [2.0, 3.0]
        assert (
            "2 kernels did not build together (no space left): each is built alone." in caplog.text
        )

    def test_an_error_in_a_kernel_is_torchs(self, folder):
        with pytest.raises(Exception, match=r"undeclared|not declared"):
            module(kernel(1), kernel(2).replace("in[0]", "nothing[0]"))

    def test_with_more_than_one_thread_too(self, folder):
        with torch._inductor.config.patch(compile_threads=2):
            assert values(module(kernel(5), kernel(6))) == [6.0, 7.0]

    def test_the_compiler_starts_while_code_is_generated(self, folder, monkeypatch):
        events = []
        for name in ("_started", "_all_started"):
            whole = getattr(inductor_cpp, name)

            def noted(kernels, submit, name=name, whole=whole):
                events.append((name, len(kernels)))
                return whole(kernels, submit)

            monkeypatch.setattr(inductor_cpp, name, noted)
        monkeypatch.setattr(inductor_cpp, "KERNELS_A_UNIT", 2)

        def program(x):
            for power in range(2, 7):
                x = torch.softmax(x**power, -1) @ x
            return x

        x = torch.randn(8, 8)
        with torch._inductor.config.patch(compile_threads=2):
            torch.testing.assert_close(torch.compile(program)(x), program(x))
        assert events == [("_started", 2)] * 2 + [("_all_started", 5), ("_started", 1)]
        assert len(libraries(folder)) == 3
        assert not inductor_cpp._started_early

    def test_numbers_are_those_of_kernels_built_alone(self, folder):
        def program(x):
            y = torch.softmax(x, -1) + torch.nn.functional.gelu(x)
            return y.cumsum(0), x.logsumexp(-1), y.to(torch.bfloat16)

        x = torch.randn(33, 65)
        together = torch.compile(program)(x)
        assert inductor_cpp._functions
        torch._dynamo.reset()
        upstream = {
            name: getattr(AsyncCompile, name).__wrapped__ for name in ("cpp_pybinding", "wait")
        }
        with pytest.MonkeyPatch.context() as patched, fresh_cache():
            for name, function in upstream.items():
                patched.setattr(AsyncCompile, name, function)
            by_torch = torch.compile(program)(x)
            assert not inductor_cpp._functions and CppPythonBindingsCodeCache.cache
        for ours, theirs in zip(together, by_torch, strict=True):
            assert torch.equal(ours, theirs)
