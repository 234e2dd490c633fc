"""No header is compiled for a kernel whose library was loaded, nor for the first few of a host that has none; for any other as in stock."""

import pytest
from torch._inductor import codecache

from dynamo_dist.torch_compat.inductor import headers


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Has a header compiled for a source; ``asked.made``: for which ones, ``asked.loaded``: whether there are artefacts."""

    def ask(code, extension="main.cpp"):
        codecache.write(code, extension)
        return codecache._precompile_header(code)

    ask.made, ask.loaded = [], False
    monkeypatch.setattr(
        codecache, "write", lambda code, extension: ("k", str(tmp_path / f"{code}.{extension}"))
    )
    monkeypatch.setattr(
        codecache, "_precompile_header", lambda header: ask.made.append(header) or "path"
    )
    monkeypatch.setattr(headers, "is_whole", lambda path: path == str(tmp_path / "there.main.so"))
    before = codecache.write, codecache._precompile_header
    changes = headers.only_for_builds(lambda: ask.loaded)
    for change in changes:
        change.apply()
    yield ask
    for change in reversed(changes):
        change.undo()
    assert (codecache.write, codecache._precompile_header) == before


def test_only_for_kernels_that_are_not_there(asked, monkeypatch):
    monkeypatch.setattr(headers, "_is_compiled", lambda: True)
    asked.loaded = True
    assert asked("there") == "" and asked.made == []
    assert asked("elsewhere") == "path"
    assert asked("there", "optimized.cpp") == "path"
    asked.loaded = False
    assert asked("there") == "path"
    assert asked.made == ["elsewhere", "there", "there"]


def test_on_a_host_without_one_the_first_libraries_are_built_without(asked, monkeypatch):
    monkeypatch.setattr(headers, "_is_compiled", lambda: False)
    said = [asked(f"{number}") for number in range(headers._WITHOUT + 2)]
    assert said == [""] * headers._WITHOUT + ["path"] * 2
    assert asked("0") == ""  # it is one of the first
