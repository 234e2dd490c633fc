"""No header is compiled for the first few libraries of a host that has none; for any other as in
upstream.
"""

import pytest
from torch._inductor import codecache

import dynamo_dist
from dynamo_dist.torch_compat import inductor_cpp


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Has a header compiled for a source; ``asked.made``: for which ones."""

    def ask(code, extension="main.cpp"):
        codecache.write(code, extension)
        return codecache._precompile_header(code)

    ask.made = []
    monkeypatch.setattr(
        codecache, "write", lambda code, extension: ("k", str(tmp_path / f"{code}.{extension}"))
    )
    monkeypatch.setattr(
        codecache, "_precompile_header", lambda header: ask.made.append(header) or "path"
    )
    before = codecache.write, codecache._precompile_header
    dynamo_dist.enable()
    yield ask
    dynamo_dist.disable()
    assert (codecache.write, codecache._precompile_header) == before


def test_first_libraries_are_built_without_a_header(asked, monkeypatch):
    monkeypatch.setattr(inductor_cpp, "_is_compiled", lambda: False)
    said = [asked(f"{number}") for number in range(inductor_cpp._WITHOUT + 2)]
    assert said == [""] * inductor_cpp._WITHOUT + ["path"] * 2
    assert asked("0") == ""  # it is one of the first
