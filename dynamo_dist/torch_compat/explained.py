"""Changes made in torch while a script is explained. Imports nothing of torch that it has not loaded itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def on_compile_call(listen: Callable[[], object], adapt: Callable[[Any], Any]) -> None:
    """Replace ``torch.compile``: ``listen`` runs before its first call, ``adapt`` changes its keywords.

    For the rest of the process. Seen in 2.13 to 2.15.
    """
    import torch

    stock: Any = torch.compile

    @functools.wraps(stock)
    def compile(model: Any = None, **kwargs: Any) -> Any:
        listen()
        return stock(model, **adapt(kwargs))

    torch.compile = compile


def meeting_point() -> str:
    """``HOST:PORT`` of the store that the process group's ranks met at; "" if it is none over TCP.

    ``_get_default_store`` is in 2.13 to 2.15.
    """
    from torch.distributed import distributed_c10d

    if not distributed_c10d.is_initialized():
        return ""
    store: Any = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else ""


def peak_device_bytes() -> dict[str, int]:
    """Most memory that tensors took on each accelerator that this process uses."""
    import torch

    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {
        f"cuda:{index}": peak
        for index in range(torch.cuda.device_count())
        if (peak := torch.cuda.max_memory_allocated(index))
    }
