"""Something to do before a process first compiles. Imports nothing of torch that it has not loaded itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def before_first_compile(prepare: Callable[[], object]) -> None:
    """Call ``prepare`` at the first ``torch.compile``; after it ``torch.compile`` is torch's again.

    What ``prepare`` raises is raised there, and it is called at the next one again. Seen in 2.11 to 2.15.
    """
    import torch

    stock: Any = torch.compile

    @functools.wraps(stock)
    def compile(*args: Any, **kwargs: Any) -> Any:
        if torch.compile is compile:
            prepare()
            torch.compile = stock
        return stock(*args, **kwargs)

    torch.compile = compile
