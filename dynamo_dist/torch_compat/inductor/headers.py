"""Headers that Inductor compiles once a host, of 150 MiB each, before it looks whether there is a kernel to build."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dynamo_dist.torch_compat.changes import Change, WrapAttribute
from dynamo_dist.torch_compat.inductor.artefacts import is_whole


def only_for_builds(wanted: Callable[[], bool]) -> list[Change]:
    """Have no header compiled for a C++ kernel whose library is there already, while ``wanted()``.

    They lie in no cache folder but in the host's temporary one: a job that starts on a new host with all its libraries would spend
    ten seconds on them. ``codecache.write`` of ``main.cpp``, followed by ``_precompile_header``, was seen in 2.11 to 2.14.
    """
    from torch._inductor import codecache

    if not hasattr(codecache, "_precompile_header"):
        return []
    last = threading.local()

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
            library = str(Path(source).with_suffix(".so"))
            if source.endswith(".main.cpp") and wanted() and is_whole(library):
                return ""  # a kernel that is built after all includes the header as source
            return str(stock(*args, **kwargs))

        return precompile

    return [
        WrapAttribute(codecache, "write", noted),
        WrapAttribute(codecache, "_precompile_header", skipped),
    ]
