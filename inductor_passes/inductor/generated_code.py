"""Read the order of launches, waits and kernels back from the code that Inductor generated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from inductor_passes.graph.collectives import KINDS

_CALL = re.compile(
    r"""^\s*(?:(?P<out>[\w, ]+?)\s*=\s*)?
        torch\.ops\._c10d_functional\.(?P<op>\w+)\.\w+\((?P<args>.*)\)\s*(?:\#.*)?$""",
    re.VERBOSE,
)
_ALIAS = re.compile(
    r"^\s*(?P<new>\w+)\s*=\s*(?:reinterpret_tensor\()?(?P<old>\w+)(?:\[\d+\])?\s*(?:[;,#].*)?$"
)
_KERNEL = re.compile(
    r"^\s*(?:\w+\s*=\s*)?(?:extern_kernels\.\w+"
    r"|torch\.ops\.(?:aten|mkldnn|mkl|inductor_passes)\.(?P<op>\w+))[.\w]*\("
)
_NAME = re.compile(r"\b(?:buf|arg|primals_|tangents_)\w*")
# Own kernels of the graph that appear as calls of the operator itself.
_OPERATORS = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "scaled_dot_product",
    "linear",
    "mkl",
    "matmul",
    "all_reduce_add",
)


def read_order(source: str) -> list[str]:
    """Events of the generated Python, in the words of ``describe.order_events``.

    ``launch KIND``, ``wait N`` (of the N-th launch) and ``kernel``.
    """
    return list(_events(source))


def _events(source: str) -> Iterator[str]:
    buffer_of: dict[str, int] = {}
    count = 0
    for line in source.splitlines():
        call = _CALL.match(line)
        if call is None:
            if _is_kernel(line):
                yield "kernel"
            alias = _ALIAS.match(line)
            if alias is not None and alias["old"] in buffer_of:
                buffer_of[alias["new"]] = buffer_of[alias["old"]]
            continue
        names = _NAME.findall(call["args"])
        if call["op"].startswith("wait_tensor"):
            if names and names[0] in buffer_of:
                yield f"wait {buffer_of[names[0]]}"
            continue
        kind = next((k for k in KINDS if call["op"].startswith(k)), "")
        if not kind:
            continue
        outputs = _NAME.findall(call["out"] or "")
        in_place = call["op"].endswith(("_", "_out"))
        written = (*outputs, *(names if in_place or not outputs else ()))
        yield f"launch {kind}"
        for name in written:
            buffer_of[name] = count
        count += 1


def order_kept(expected: Sequence[str], source: str | None) -> bool | None:
    """Return whether the generated code runs launches, waits and kernels in the order the passes
    left.

    Kernels count only where the generated code has as many as the graph (templates and
    decompositions change their number). None if there is no Python source to read.
    """
    if source is None or not expected:
        return None
    found = read_order(source)
    if not any(event.startswith("launch") for event in found):
        return None
    found, wanted = (
        _without_second_waits(events) for events in (found, map(_without_group, expected))
    )
    if found.count("kernel") != wanted.count("kernel"):
        found = [event for event in found if event != "kernel"]
        wanted = [event for event in wanted if event != "kernel"]
    return found == wanted


def _is_kernel(line: str) -> bool:
    match = _KERNEL.match(line)
    if match is None:
        return False
    return match["op"] is None or any(name in match["op"] for name in _OPERATORS)


def _without_second_waits(events: Iterable[str]) -> list[str]:
    """A launch that was waited for is there: to wait again does nothing."""
    kept: list[str] = []
    waited: set[str] = set()
    for event in events:
        if event not in waited:
            kept.append(event)
        if event.startswith("wait"):
            waited.add(event)
    return kept


def _without_group(event: str) -> str:
    word, _, rest = event.partition(" ")
    return f"{word} {rest.split()[0]}" if word == "launch" else event
