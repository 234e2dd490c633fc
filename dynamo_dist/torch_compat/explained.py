"""What a script that is explained asks of torch, from its first compile on."""

from __future__ import annotations

from typing import Any

from dynamo_dist.torch_compat.changes import ConfigDefault


def compile_by_default_with(backend: str) -> None:
    """Have ``torch.compile`` use ``backend`` where a program names none, for the rest of the process."""
    import torch

    torch.compiler.set_default_backend(backend)


def observe_inductor(observer: Any) -> None:
    """Have Inductor call ``observer`` behind its passes on each graph, unless the program sets such a pass itself."""
    from torch._inductor import config

    # Of every thread: backward graphs may be compiled in another one.
    ConfigDefault(config, "post_grad_custom_post_pass", observer).apply()


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
