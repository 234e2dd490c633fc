"""Inductor's loops on whole tensors: what a kernel written by ``without_cpp.py`` calls.

A loop's index is a tensor that broadcasts over the loop's dimensions; a load is a lookup in flat
memory, a store a scatter into it. Slow for large tensors, but nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Value = Any  # a tensor or a Python number


def indices(sizes: Sequence[int]) -> list[torch.Tensor]:
    """One index for each of the loop's dimensions."""
    return [
        torch.arange(size).reshape([-1 if at == dim else 1 for at in range(len(sizes))])
        for dim, size in enumerate(sizes)
    ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Memory from the tensor's first element on, as a pointer has it."""
    tensor = tensor.detach()
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    start = tensor.storage_offset()
    return tensor.as_strided((max(whole - start, 0),), (1,), start)


def load(tensor: torch.Tensor, index: Value) -> torch.Tensor:
    """Elements at ``index``; lowered 16-bit types compute in 32 bits. Masked lookups may leave
    the memory.
    """
    flat = _flat(tensor)
    value = flat[torch.as_tensor(index).clamp(0, max(len(flat) - 1, 0))]
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def store(
    tensor: torch.Tensor, index: Value, value: Value, sizes: Sequence[int], mode: str | None = None
) -> None:
    """Write ``value`` over the loop of ``sizes``; with ``atomic_add`` add it."""
    flat = _flat(tensor)
    value = torch.as_tensor(value).to(tensor.dtype).broadcast_to(tuple(sizes)).reshape(-1)
    where = torch.as_tensor(index).broadcast_to(tuple(sizes)).reshape(-1)
    flat.index_put_((where,), value, accumulate=mode == "atomic_add")


def reduce(kind: str, dtype: torch.dtype, value: Value, shape: Sequence[int], dims: int) -> Any:
    """``value`` over a loop of ``shape``, reduced over its last ``dims`` dimensions, which stay
    with size 1.
    """
    outer = len(shape) - dims

    def rows(part: Value) -> torch.Tensor:
        whole = torch.as_tensor(part).broadcast_to(tuple(shape))
        return whole.reshape(*shape[:outer], -1)

    def back(result: torch.Tensor, to: torch.dtype | None = dtype) -> torch.Tensor:
        return result.to(to).reshape(*shape[:outer], *[1] * dims)

    if kind == "welford_combine":
        mean, m2, weight = (rows(part) for part in value)
        total = weight.sum(-1)
        middle = (mean * weight).sum(-1) / total
        spread = (m2 + weight * (mean - middle.unsqueeze(-1)) ** 2).sum(-1)
        return back(middle), back(spread), back(total)
    given = rows(value)
    if kind == "welford_reduce":
        count = torch.full(given.shape[:-1], given.shape[-1])
        return (
            back(given.mean(-1)),
            back(given.var(-1, correction=0) * given.shape[-1]),
            back(count),
        )
    reduced: dict[str, Callable[[], torch.Tensor]] = {
        "sum": lambda: given.sum(-1),
        "prod": lambda: given.prod(-1),
        "max": lambda: given.amax(-1),
        "min": lambda: given.amin(-1),
        "any": lambda: given.any(-1),
        "argmax": lambda: given.argmax(-1),
        "argmin": lambda: given.argmin(-1),
    }
    return back(reduced[kind]())


def wrapped(index: Value, size: Value) -> Value:
    """A looked-up index, negative ones from the end."""
    return torch.where(torch.as_tensor(index) < 0, index + size, index)


_NAMED: dict[str, Callable[..., Any]] = {
    "truediv": torch.true_divide,
    "int_truediv": torch.true_divide,
    "div_rn": torch.true_divide,
    "floordiv": torch.floor_divide,
    "truncdiv": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "mod": torch.fmod,
    "and_": torch.bitwise_and,
    "or_": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "identity": lambda x: x,
    "mul_rn": torch.mul,
    "fma": lambda a, b, c: a * b + c,
    "trunc_to_int": lambda x, dtype: torch.trunc(x).to(dtype),
    "floor_to_int": lambda x, dtype: torch.floor(x).to(dtype),
    "ceil_to_int": lambda x, dtype: torch.ceil(x).to(dtype),
    "round_to_int": lambda x, dtype: torch.round(x).to(dtype),
    "to_dtype": lambda x, dtype, *_, **__: torch.as_tensor(x).to(dtype),
    "to_dtype_bitcast": lambda x, dtype, src: x.to(src).view(dtype),
    "constant": lambda value, dtype: torch.tensor(value, dtype=dtype),
    "index_expr": lambda value, dtype: torch.as_tensor(value).to(dtype),
    "value_expr": lambda value, dtype: torch.as_tensor(value).to(dtype),
    "masked": torch.where,
}


def op(name: str, *args: Value, **kwargs: Value) -> Any:
    """Any other operator of a loop's body, by Inductor's name for it."""
    function = _NAMED.get(name) or getattr(torch, name)
    tensors = [
        torch.as_tensor(arg) if isinstance(arg, int | float) and name not in _NAMED else arg
        for arg in args
    ]
    return function(*tensors, **kwargs)
