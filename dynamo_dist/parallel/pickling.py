"""Modules whose class was made at run time, pickled: by what makes the class, which nobody can import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

# ``make(base, key)``: the class that stands in front of ``base``.
Make = Callable[[type[nn.Module], Any], type[nn.Module]]


def reduced_as(base: type[nn.Module], make: Make, key: object) -> Callable[[nn.Module, Any], Any]:
    """A ``__reduce_ex__`` for the class ``make(base, key)``: the module as ``base`` pickles it, and the class.

    ``make`` must be a function of a module, and ``key`` must be picklable. Copies go the same way.
    """

    def reduce(self: nn.Module, protocol: Any) -> Any:
        found = base.__reduce_ex__(self, protocol)
        if isinstance(found, str):
            return found
        function, args, *rest = found
        plain = tuple(base if each is type(self) else each for each in args)
        return (_made_again, (make, key, function, plain), *rest)

    return reduce


def _made_again(make: Make, key: object, function: Callable[..., Any], args: Any) -> nn.Module:
    module: nn.Module = function(*args)
    module.__class__ = make(type(module), key)
    return module
