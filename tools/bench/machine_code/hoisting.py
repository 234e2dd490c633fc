"""Checks for compiled code that loads what peers have sent before the wait for it, or signals
before it has stored.

Two kinds of kernel wait. A product waits for each tile: its loop over tiles holds waits and loads,
and Triton's pipeliner may start a copy an iteration early. A sum over ranks waits once or twice,
and then reads what lies behind the addresses of its peers. For either, order is read from TTGIR,
after the pipeliner, and from machine code.
"""

from __future__ import annotations

import re

COPY = re.compile(r"ttg\.async_copy_global_to_local|ttng\.async_tma_copy_global_to_local")
TILE_LOAD = re.compile(r"tt\.load .*tensor<\d+x\d+x")
ROW_LOAD = re.compile(r"tt\.load (%\w+)\b.*tensor<")
LOOP = re.compile(r"^\s*(?:%\S+ = )?scf\.(?:for|while)\b")
ACQUIRE = re.compile(r"tt\.atomic_rmw .*acquire|inline_asm.*acquire")
# One flag is read by a load; several by atomics, whose results are kept: those that signal drop
# theirs.
ACQUIRING_READ = re.compile(r"\bLD\S*\.STRONG\.SYS\b|\bATOMG?\.E\.ADD\S*\.STRONG\.SYS PT, R\d")
SIGNAL = re.compile(r"tt\.atomic_rmw .*\b(?:release|acq_rel)\b")
STORE, BARRIER = re.compile(r"tt\.store (%\w+)\b.*tensor<"), re.compile(r"\b(?:gpu|ttg)\.barrier\b")
WIDE_LOAD, WIDE_STORE = re.compile(r"\bLDG?\.E\S*\.128\b"), re.compile(r"\bSTG?\.E\S*\.128\b")
# Addresses of peers' data are integers in memory; those of flags are made into pointers to i32.
PEER_DATA = re.compile(r"tt\.int_to_ptr .*!tt\.ptr<(?:bf16|f16|f32)>")
DEFINED = re.compile(r"^\s*(%\w+)(?::\d+)? = ")
CARRIED = re.compile(r"(%\w+) = (%\w+)")


def hoisted_load(ttgir: str, sass: str) -> str:
    """Tell why a load of what peers have sent may run before its wait; "" if none may, or if
    nothing waits.
    """
    lines, code = ttgir.splitlines(), sass.splitlines()
    acquires = [n for n, line in enumerate(lines) if ACQUIRE.search(line)]
    if not acquires:
        return ""
    tiles = [n for n, line in enumerate(lines) if COPY.search(line) or TILE_LOAD.search(line)]
    if tiles:
        return _hoisted_tile(lines, acquires, tiles) or _copied_early(code)
    return _hoisted_row(lines, acquires) or _read_early(code)


def early_signal(ttgir: str) -> str:
    """Tell why a flag may be set before what it stands for is stored; "" if none may.

    One thread sets the flag, and releases what it has written itself: a barrier must stand before
    it. And what is stored at a peer, or for a peer, must have a signal behind it.
    """
    last = ""
    lines = ttgir.splitlines()
    signals = [n for n, line in enumerate(lines) if SIGNAL.search(line)]
    if not signals:
        return ""
    for number, line in enumerate(lines):
        if STORE.search(line) or BARRIER.search(line):
            last = line
        elif SIGNAL.search(line) and STORE.search(last):
            return (
                "a flag is set with no barrier after the stores before it (TTGIR line "
                f"{number + 1})"
            )
    _, sent = _of_peers(lines)
    if not sent:
        return "no store of data that peers read was found: the check does not know this code"
    if sent[-1] > signals[-1]:
        return f"data is stored for a peer after the last signal (TTGIR line {sent[-1] + 1})"
    return ""


def _hoisted_tile(lines: list[str], acquires: list[int], loads: list[int]) -> str:
    """The wait and the loads stand in one loop over tiles.

    If that loop itself is pipelined, it carries copies from one iteration to the next: they were
    started before the wait of the tile they belong to. Otherwise it is enough that the wait comes
    first in its body.
    """
    if loads[0] < acquires[0]:
        return f"a tile is loaded before the first wait (TTGIR line {loads[0] + 1})"
    for first, last in _loops(lines):
        waits = [n for n in acquires if first < n < last]
        reads = [n for n in loads if first < n < last]
        if waits and reads and "!ttg.async.token" in lines[first]:
            return (
                f"a loop that waits carries copies started before the wait (TTGIR line {first + 1})"
            )
        if waits and reads and reads[0] < waits[0]:
            return f"a tile is loaded before its wait (TTGIR line {reads[0] + 1})"
    return ""


def _hoisted_row(lines: list[str], acquires: list[int]) -> str:
    """No peer's data is read before the first wait, and some of it after the last."""
    reads, _ = _of_peers(lines)
    if not reads:
        return "no load of a peer's data was found: the check does not know this code"
    if reads[0] < acquires[0]:
        return f"a peer's data is read before the first wait (TTGIR line {reads[0] + 1})"
    if reads[-1] < acquires[-1]:
        return f"no peer's data is read after the last wait (TTGIR line {acquires[-1] + 1})"
    return ""


def _of_peers(lines: list[str]) -> tuple[list[int], list[int]]:
    """Lines that load and that store by a pointer to peers' data, however it was computed."""
    pointers: set[str] = set()
    loads: list[int] = []
    stores: list[int] = []
    for number, line in enumerate(lines):
        if "iter_args" in line:
            pointers.update(inner for inner, outer in CARRIED.findall(line) if outer in pointers)
        for kind, found in ((ROW_LOAD, loads), (STORE, stores)):
            if (access := kind.search(line)) and access[1] in pointers:
                found.append(number)
        defined = DEFINED.match(line)
        if defined is None:
            continue
        operands = re.findall(r"%\w+", line[defined.end() :])
        points = "tt.ptr" in line and "tt.load" not in line
        if PEER_DATA.search(line) or (points and not pointers.isdisjoint(operands)):
            pointers.add(defined[1])
        else:
            pointers.discard(defined[1])  # regions beside each other use a name again
    return loads, stores


def _copied_early(code: list[str]) -> str:
    copies = [n for n, line in enumerate(code) if "LDGSTS" in line]
    waits = [n for n, line in enumerate(code) if ACQUIRING_READ.search(line)]
    if copies and (not waits or copies[0] < waits[0]):
        return "machine code copies a tile before the first acquiring read"
    return ""


def _read_early(code: list[str]) -> str:
    """Before the first wait a rank copies its own input: as many loads as stores, and none
    beyond.
    """
    waits = [n for n, line in enumerate(code) if ACQUIRING_READ.search(line)]
    if not waits:
        return "machine code has no acquiring read"
    before = code[: waits[0]]
    loads, stores = (
        sum(bool(kind.search(line)) for line in before) for kind in (WIDE_LOAD, WIDE_STORE)
    )
    if loads > stores:
        return f"machine code has {loads} loads and {stores} stores before the first acquiring read"
    if not any(WIDE_LOAD.search(line) for line in code[waits[-1] :]):
        return "machine code reads nothing after the last acquiring read"
    return ""


def _loops(lines: list[str]) -> list[tuple[int, int]]:
    """First and last line of every loop; MLIR prints the end of a region at the indent of its
    op.
    """
    found, unfinished = [], []
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if LOOP.search(line):
            unfinished.append((number, indent))
        elif unfinished and line.lstrip().startswith("}") and indent == unfinished[-1][1]:
            if "do {" not in line:  # the middle of a while
                found.append((unfinished.pop()[0], number))
    return found
