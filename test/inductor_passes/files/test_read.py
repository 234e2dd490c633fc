"""Whatever a file is, reading it ends soon, in values or in one line."""

import gzip
import resource

import pytest

from inductor_passes import files
from inductor_passes.errors import ProblemError
from inductor_passes.files import MIB

LIST = files.Form("list", ProblemError, "Write one.", {"type": "array"}, most_bytes=MIB)


def refusal(path, form=LIST):
    with pytest.raises(ProblemError) as caught:
        files.load(path, form)
    said = str(caught.value)
    assert "\n" not in said
    return said.replace(str(path), "FILE")


@pytest.fixture
def written(tmp_path):
    def write(content):
        (tmp_path / "x.json").write_bytes(content)
        return tmp_path / "x.json"

    return write


def test_plain_gzipped_and_with_a_byte_order_mark(written):
    for content in (b"[1]", gzip.compress(b"[1]"), b"\xef\xbb\xbf[1]"):
        assert files.load(written(content), LIST) == [1]
    joined = gzip.compress(b"[1") + gzip.compress(b"]") + b"\0\0"
    assert files.load(written(joined), LIST) == [1]


REFUSED = {
    b"[" * 10**5: "List file 'FILE' is not JSON that Python reads: maximum recursion depth exceeded while decoding a "
    "JSON array from a unicode string. Correct the file. Write one.",
    b"[1,]": "List file 'FILE' is not JSON: Expecting value at line 1, column 4. Correct the file. "
    "Write one.",
    b"7": "List file 'FILE': the whole file is 7, but it must have type \"array\". Correct the file. Write one.",
    b"\xff\xfe[": "Cannot read list 'FILE': it is not UTF-8 text. Write one.",
    b" " * (MIB + 1): "Cannot read list 'FILE': it has more than 1 MiB. Write one.",
    gzip.compress(b" " * (MIB + 1)): "Cannot read list 'FILE': it has more than 1 MiB. Write one.",
    gzip.compress(b"[1]")[:-9]: "Cannot read list 'FILE': it is not whole gzip (Compressed file ended before the "
    "end-of-stream marker was reached). Write one.",
}  # fmt: skip


@pytest.mark.parametrize("content", REFUSED, ids=range(len(REFUSED)))
def test_what_is_none_is_refused_in_one_line(written, content):
    assert refusal(written(content)) == REFUSED[content]


def test_a_bomb_of_gzip_costs_what_is_allowed_and_no_more(written):
    form = files.Form("list", ProblemError, "Write one.", most_bytes=16 * MIB)
    path = written(gzip.compress(b"0" * 2**26) * 64)  # 4 GiB
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "it has more than 16 MiB" in refusal(path, form)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_what_cannot_be_read_is_named(tmp_path):
    assert "Is a directory" in refusal(tmp_path)
    assert "No such file" in refusal(tmp_path / "none")
    assert "null byte" in refusal("a\0b")


def test_a_long_or_many_lined_value_stays_short_and_on_its_line():
    for value in ("a\nb" * 999, [0] * 10**5, {str(i): 0 for i in range(999)}, 10**999, None):
        with pytest.raises(ProblemError) as caught:
            files.checked({"a": [value]}, files.Form("x", ProblemError, "", {"const": 1}))
        assert len(str(caught.value)) < 120
    form = files.Form("x", ProblemError, "", {"type": "array", "items": {"type": "boolean"}})
    for value in ("a\nb" * 999, 10**4000, float("nan")):  # a file has no longer numbers
        with pytest.raises(ProblemError) as caught:
            files.checked([value], form)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 160
