"""What a frame sees: values at sources, Dynamo's settings, torch's state."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.guards as _guards
from torch._dynamo.eval_frame import innermost_backend as _innermost
from torch.utils import _config_module

# Marks of functions that hold an address: where Dynamo has wrapped one. Seen in 2.11 to 2.14.
ADDRESSES = frozenset({"_torchdynamo_wrapper_id"})
# What a setting of torch's holds that nobody has set. Seen in 2.11 to 2.14.
UNSET = getattr(_config_module, "_UNSET_SENTINEL", object())


def name_of_backend(backend: Callable[..., Any]) -> str:
    """Name of the backend that a frame is compiled by. ``compiler_name`` was seen in 2.11 to 2.15."""
    inner = _innermost(backend)
    return str(getattr(inner, "compiler_name", None) or getattr(inner, "__qualname__", type(inner)))


class Values:
    """Values of sources in a frame."""

    def __init__(self, locals_: Mapping[str, Any], globals_: Mapping[str, Any]) -> None:
        self._scope = {"L": locals_, "G": globals_, "__builtins__": vars(builtins).copy()}
        self._names = _guards._get_closure_vars()
        self._cache: dict[Any, Any] = {}

    def __getitem__(self, source: Any) -> Any:
        """Value of a source. Raises LookupError if there is none."""
        try:
            return source.get_value(self._scope, self._names, self._cache)
        except Exception as error:
            raise LookupError(source.name) from error


def modes() -> str:
    """A mode of torch that is on and in which no frame is kept or loaded, or ""."""
    on = {
        "a function mode": torch._C._len_torch_function_stack(),
        "a transform of functorch": torch._C._functorch.peek_interpreter_stack() is not None,
        "hooks on saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "forward derivatives": torch.autograd.forward_ad._current_level != -1,
    }
    return next((name for name, is_on in on.items() if is_on), "")


def settings() -> tuple[tuple[str, str], ...]:
    """Dynamo's configuration as this compile has it, as far as it changes what is compiled, and torch's state; by name."""
    config, ignored = (
        _dynamo_config.get_config_copy(),
        getattr(_dynamo_config, "_compile_ignored_keys", ()),
    )
    found = {
        f"torch._dynamo.config.{name}": _plain(value)
        for name, value in config.items()
        if name not in ignored
    }
    state: Any = torch._C._dynamo.guards.GlobalStateGuard()
    guarded = json.loads(state.__getstate__())
    found |= {f"torch's state {name}": str(value) for name, value in guarded.items()}
    found["the default device"] = str(torch.utils._device.CURRENT_DEVICE)
    return tuple(sorted(found.items()))


def _plain(value: Any) -> str:
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(repr, value)))
    return getattr(value, "__qualname__", None) or repr(value)
