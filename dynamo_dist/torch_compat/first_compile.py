"""Something to do before a process first compiles. Imports nothing of torch that it has not loaded itself."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any


def before_first_compile(prepare: Callable[[], object]) -> None:
    """Call ``prepare`` at the first ``torch.compile`` or ``Module.compile``; both are torch's again before that.

    What ``prepare`` raises is raised there, and it is called at the next one again. Seen in 2.13 to 2.15.
    """
    import torch

    places: list[tuple[Any, str]] = [(torch, "compile"), (torch.nn.Module, "compile")]
    stock = [getattr(owner, name) for owner, name in places]
    lock = threading.RLock()

    def waiting(owner: Any, name: str) -> Any:
        @functools.wraps(getattr(owner, name))
        def compile(*args: Any, **kwargs: Any) -> Any:
            with lock:
                if getattr(owner, name) is compile:
                    put(stock)
                    try:
                        prepare()
                    except BaseException:
                        put(ours)
                        raise
            # What is there now, which ``prepare`` may have changed.
            return getattr(owner, name)(*args, **kwargs)

        return compile

    def put(functions: list[Any]) -> None:
        for (owner, name), function in zip(places, functions, strict=True):
            setattr(owner, name, function)

    ours = [waiting(owner, name) for owner, name in places]
    put(ours)
