"""Files that Inductor keeps beside its cache: one that is not whole counts as none."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import struct
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dynamo_dist.torch_compat.changes import Change, WrapAttribute

log = logging.getLogger(__name__)
# Of a file of a 64-bit ELF in this byte order: where its last part, the table of sections, begins, and its length.
_TABLE = struct.Struct("=40xQ10xHH")


def damaged_is_absent() -> list[Change]:
    """Have Inductor write again what it kept of a compile that did not come to its end, or was copied in part.

    It looks whether a file is there, and loads it: after a killed compile or a full disk every later start fails on half
    a library or half a module. Libraries are built under another name first. ``codecache.write``,
    ``_worker_compile_cpp`` and ``CompiledFxGraph.write_to_disk`` were seen in 2.13 and 2.14.
    """
    from torch._inductor import codecache
    from torch._inductor.output_code import CompiledFxGraph

    def sources(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def write(content: str | bytes, *args: Any, **kwargs: Any) -> tuple[str, str]:
            key, path = stock(content, *args, **kwargs)
            _make_whole(path, content, codecache.write_atomic)
            return key, path

        return write

    def modules(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def write_to_disk(self: Any) -> str:
            path: str = stock(self)
            _make_whole(path, self.source_code, codecache.write_atomic)
            return path

        return write_to_disk

    changes = [
        (codecache, "write", sources),
        (CompiledFxGraph, "write_to_disk", modules),
        (codecache, "_worker_compile_cpp", lambda stock: build),
    ]
    return [WrapAttribute(*change) for change in changes if hasattr(*change[:2])]


def build(lock_path: str, builders: Sequence[Any]) -> None:
    """Build what of ``builders`` is not there whole, as Inductor's ``_worker_compile_cpp``, also in its processes."""
    from torch._inductor.codecache import LOCK_TIMEOUT
    from torch.utils._filelock import FileLock

    with FileLock(lock_path, timeout=LOCK_TIMEOUT):
        for builder in builders:
            target = builder.get_target_file_path()
            if is_whole(target):
                continue
            if os.path.exists(target):
                log.warning("%s is not whole: it is built again.", target)
            unfinished = f"{target}.{uuid.uuid4().hex}"
            elsewhere = copy.copy(builder)
            elsewhere._target_file = unfinished
            elsewhere._output = builder._output.replace(builder._target_file, unfinished)
            try:
                elsewhere.build()
                os.replace(unfinished, target)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(unfinished)


def is_whole(path: str) -> bool:
    """Return whether a file is there, and as long as its own header says if it is a library or an object of Linux.

    The loader itself maps what is too short, and the process ends at the first use of the rest.
    """
    try:
        with open(path, "rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return False
    if path.endswith((".so", ".o")) and os.name == "posix" and os.uname().sysname == "Linux":
        if len(header) < 64 or not header.startswith(b"\x7fELF"):
            return False
        if header[4] == 2:  # 64 bits
            start, entry, entries = _TABLE.unpack_from(header)
            return 0 < start <= start + entry * entries <= size
    return size > 0


def _make_whole(path: str, content: str | bytes, write: Callable[..., None]) -> None:
    """Write ``content`` once more where only the first part of it is; what somebody has edited stays."""
    wanted = content if isinstance(content, bytes) else content.encode()
    found = Path(path).read_bytes().rstrip(b"\0")
    if len(found) < len(wanted.rstrip(b"\0")) and wanted.startswith(found):
        log.warning("%s is not whole: it is written again.", path)
        write(path, content)
