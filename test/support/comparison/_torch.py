"""Private torch names for running programs beside upstream, seen in torch 2.13."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.registry import lookup_backend
from torch._functorch import config as aot_config
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.graph import GraphLowering


@contextlib.contextmanager
def no_kernels() -> Iterator[None]:
    """Inductor lowers, schedules and writes its code; what then runs is the graph, node by node.

    A fault of lowering or of code generation shows in seconds, because nothing is compiled by C++.
    """
    upstream: Any = GraphLowering.compile_to_module

    def written(self: Any) -> Any:
        code, _ = self.codegen()
        compile(code.value, "<Inductor's code>", "exec")
        key, path = PyCodeCache.write(code.value)
        self.cache_key, self.cache_path, self.cache_linemap = key, path, []

        def call(arguments: list[Any]) -> Any:
            given = list(arguments)
            arguments.clear()
            return _Run(self.module).run(*given)

        return SimpleNamespace(call=call, __file__=path, key=key)

    patched: Any = GraphLowering
    patched.compile_to_module = written
    try:
        with (
            config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
            aot_config.patch(enable_autograd_cache=False),
        ):
            yield
    finally:
        patched.compile_to_module = upstream


class _Run(fx.Interpreter):
    """The nodes as they stood before lowering. Nothing of autograd is left to record."""

    def run(self, *args: Any) -> Any:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Inductor's functions return what its wrapper makes of the outputs: a tuple.
            return tuple(super().run(*args))


def backend_named(name: str) -> Callable[..., Any]:
    """What ``torch.compile(backend=name)`` calls."""
    found: Any = lookup_backend(name)
    return found  # type: ignore[no-any-return]


@contextlib.contextmanager
def flex_attention_anywhere() -> Iterator[None]:
    """Gradients of ``flex_attention`` on the CPU too, where its operator has none but the graph
    that is traced.
    """
    from torch.nn.attention import flex_attention as module

    upstream = module._validate_device
    patched: Any = module
    patched._validate_device = lambda *tensors: None
    try:
        yield
    finally:
        patched._validate_device = upstream
