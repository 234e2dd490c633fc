"""Headers that Inductor compiles once a host, of 150 MiB each, before it looks whether there is a kernel to build, and how many."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_dist.torch_compat.changes import Change, WrapAttribute, has

# As many libraries take longer without a compiled header, together, as the header takes: a second each.
_WITHOUT = 5


def only_for_builds() -> list[Change]:
    """Have no header compiled for the first five C++ libraries on a host that has none.

    It lies in no cache folder but in the host's temporary one: a job that starts on a new host would spend ten seconds on it.
    ``codecache.write`` of ``main.cpp``, followed by ``_precompile_header``, was seen in 2.13 and 2.14, the
    folder ``_HEADER_DIR`` in 2.13.
    """
    from torch._inductor import codecache

    if not has(codecache, "_precompile_header", off="a first compile on a host builds headers"):
        return []
    last = threading.local()
    without: set[str] = set()

    def noted(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def write(*args: Any, **kwargs: Any) -> tuple[str, str]:
            key, path = stock(*args, **kwargs)
            last.source = path
            return key, path

        return write

    def skipped(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def precompile(*args: Any, **kwargs: Any) -> str:
            source = getattr(last, "source", "")
            if source.endswith(".main.cpp"):
                if len(without | {source}) <= _WITHOUT and not _is_compiled():
                    without.add(source)
                    return ""
            return str(stock(*args, **kwargs))

        return precompile

    return [
        WrapAttribute(codecache, "write", noted),
        WrapAttribute(codecache, "_precompile_header", skipped),
    ]


def _is_compiled() -> bool:
    """Return whether this host has a compiled header: of this torch and compiler, most likely."""
    from torch._inductor import codecache

    folder = getattr(codecache, "_HEADER_DIR", None)
    return folder is not None and any(Path(folder).glob("*.*ch"))
