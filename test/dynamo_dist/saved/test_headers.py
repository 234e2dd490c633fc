"""No header is compiled for a kernel whose library was loaded; for any other, and without ``load``, as in stock."""

from torch._inductor import codecache

from dynamo_dist.torch_compat.inductor import headers


def test_only_for_kernels_that_are_not_there(tmp_path, monkeypatch):
    made, loaded = [], [True]
    monkeypatch.setattr(
        codecache, "write", lambda code, extension: ("k", str(tmp_path / f"{code}.{extension}"))
    )
    monkeypatch.setattr(
        codecache, "_precompile_header", lambda header: made.append(header) or "path"
    )
    monkeypatch.setattr(headers, "is_whole", lambda path: path == str(tmp_path / "there.main.so"))
    before = codecache.write, codecache._precompile_header
    changes = headers.only_for_builds(lambda: loaded[0])
    for change in changes:
        change.apply()

    def asked(code, extension="main.cpp"):
        codecache.write(code, extension)
        return codecache._precompile_header(code)

    assert asked("there") == "" and made == []
    assert asked("elsewhere") == "path"
    assert asked("there", "optimized.cpp") == "path"
    loaded[0] = False
    assert asked("there") == "path"
    assert made == ["elsewhere", "there", "there"]
    for change in reversed(changes):
        change.undo()
    assert (codecache.write, codecache._precompile_header) == before
