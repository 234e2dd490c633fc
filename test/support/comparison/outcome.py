"""How a program ended on one side, and what the two sides come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

# How a program ends on one side. Unfit: not even its reference can be computed here.
ENDS = ("right", "wrong", "error", "hang", "crash", "unfit", "breaks", "refuses")
# What both sides come to. None may be lost, and none wrong.
VERDICTS = ("same", "gained", "neither", "unfit", "lost", "wrong")
BAD = ("lost", "wrong")
RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_LARGEST = 4096  # numbers of one result that are kept to be compared with the other side


class Unfit(Exception):
    """The program cannot run here without torch.compile or ranks either."""


@dataclass(frozen=True, slots=True)
class End:
    """How one side ended. ``numbers`` are results that have no reference but the other side.

    truth: whose eager mode the reference is, where that may be the plugin's.
    """

    status: str
    why: str = ""
    numbers: tuple[Any, ...] = ()
    truth: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> End:
        return End(**{**data, "numbers": tuple(data.get("numbers", ()))})


@dataclass(frozen=True, slots=True)
class Verdict:
    """One of ``VERDICTS``, and what stands against it."""

    name: str
    why: str = ""


def judge(upstream: End, ours: End, theirs: bool = False, explained: bool = False) -> Verdict:
    """Never worse than upstream: ours may fail where upstream fails, and may never be wrong, hang
    or die.

    theirs: the programs are code of others, who may be wrong themselves; what is wrong in upstream
    is then not held against ours. explained: ours may refuse or break a graph, but neither fail
    otherwise nor hang.
    """
    if "unfit" in (upstream.status, ours.status) and upstream.status == ours.status:
        return Verdict("unfit", ours.why)
    if theirs and upstream.status == ours.status == "wrong":
        return Verdict("neither", ours.why)
    if ours.status == "wrong":
        return Verdict("wrong", f"{ours.why} (upstream: {upstream.status})")
    failed = ("hang", "crash", "error") if explained else ("hang", "crash")
    if ours.status in failed and (explained or upstream.status not in failed):
        return Verdict("lost", f"{ours.status}: {ours.why} (upstream: {upstream.status})")
    if ours.status == "right":
        if upstream.status != "right":
            return Verdict("gained", f"upstream: {upstream.status}: {upstream.why}")
        apart = _apart(upstream.numbers, ours.numbers)
        return Verdict("wrong", f"upstream and ours: {apart}") if apart else Verdict("same")
    if upstream.status == "right":
        return Verdict("lost", ours.why)
    return Verdict("neither", ours.why)


def end_of(error: BaseException) -> End:
    """The end of a program that raised: the error's first lines that say something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:4])[:400]
    return End("unfit" if isinstance(error, Unfit) else "error", f"{type(error).__name__}: {text}")


def compare(found: Any, expected: Any, what: str = "", relative: float | None = None) -> str:
    """What differs between two trees of tensors and values, or nothing.

    Floats may be apart by ``relative`` of the largest value of the tensor: by default by a few
    roundings.
    """
    one, other = pytree.tree_leaves(found), pytree.tree_leaves(expected)
    if len(one) != len(other):
        return f"{what}: {len(one)} results, expected {len(other)}"
    for at, (a, b) in enumerate(zip(one, other, strict=True)):
        if problem := _leaf(a, b, relative):
            return f"{what} {at}: {problem}"
    return ""


def _leaf(found: Any, expected: Any, relative: float | None) -> str:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        return (
            ""
            if type(found) is type(expected) and found == expected
            else f"{found!r}, expected {expected!r}"
        )
    a, b = plain(found), plain(expected)
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)}, expected {b.dtype} {list(b.shape)}"
    if not (a.is_floating_point() or a.is_complex()):
        return "" if torch.equal(a, b) else f"{int((a != b).sum())} values differ"
    if not a.numel():
        return ""
    wide = torch.complex128 if a.is_complex() else torch.float64
    allowed = RELATIVE.get(a.dtype, 1e-5) if relative is None else relative
    a, b = a.to(wide), b.to(wide)
    scale = max(float(b.abs().nan_to_num(0.0, 0.0, 0.0).max()), 0.1)
    if torch.allclose(a, b, rtol=allowed, atol=allowed * scale, equal_nan=True):
        return ""
    return f"off by {float((a - b).abs().nan_to_num(math.inf).max()):.3g} of {scale:.3g}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Whole, waited for, and out of autograd."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
    return tensor.detach().resolve_conj().resolve_neg()


def numbers(results: Any) -> tuple[Any, ...]:
    """Results as JSON can hold them, shortened, for the comparison of one side with the other."""
    kept: list[Any] = []
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, torch.Tensor):
            flat = plain(leaf).flatten()
            flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
            kept.append([str(leaf.dtype), list(leaf.shape), flat.double()[:_LARGEST].tolist()])
        else:
            kept.append(repr(leaf) if not isinstance(leaf, (int, float, bool)) else leaf)
    return tuple(kept)


def _apart(upstream: Sequence[Any], ours: Sequence[Any]) -> str:
    if len(upstream) != len(ours):
        return f"{len(upstream)} and {len(ours)} results"
    for at, (a, b) in enumerate(zip(upstream, ours, strict=True)):
        if isinstance(a, list) and isinstance(b, list):
            if list(a[:2]) != list(b[:2]):
                return f"result {at}: {a[:2]} and {b[:2]}"
            x, y = (torch.tensor(each[2], dtype=torch.float64) for each in (a, b))
            problem = _leaf(y, x, 1e-5)
            if problem:
                return f"result {at}: {problem}"
        elif a != b:
            return f"result {at}: {a!r} and {b!r}"
    return ""
