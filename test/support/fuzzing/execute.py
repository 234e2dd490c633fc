"""Run a program on all ranks: in eager mode, compiled, and on one device; say whether they
agree.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as dnf
import torch.nn.functional as F
from fuzzing._torch import Unsupported, without_timed_guards
from fuzzing.group import LaunchesDiffer, on_ranks
from fuzzing.program import Program
from fuzzing.turns import Hang
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from dynamo_dist.numerics.differences import how_far
from inductor_passes.inductor.session import graph_passes_only

NAMES = {
    "ColwiseParallel": ColwiseParallel,
    "DTensor": DTensor,
    "F": F,
    "Partial": Partial,
    "Replicate": Replicate,
    "RowwiseParallel": RowwiseParallel,
    "SequenceParallel": SequenceParallel,
    "Shard": Shard,
    "checkpoint": checkpoint,
    "fully_shard": fully_shard,
    "dist": dist,
    "dnf": dnf,
    "fc": fc,
    "parallelize_module": parallelize_module,
    "torch": torch,
}
ROWS = (12, 24)  # the size "n" in the first and in the second call

Seen = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """``status``: ok, refused (eager mode raises), mismatch, crash, hang or break; ``why``: in
    words.
    """

    status: str
    why: str = ""

    @property
    def found(self) -> bool:
        return self.status not in ("ok", "refused")


@dataclass(frozen=True, slots=True)
class _Stopped:
    """How far a rank came: in eager mode or in the compiled program."""

    stage: str
    error: BaseException


def execute(program: Program) -> Verdict:
    """The verdict on a program; its ranks are threads of this process."""
    results = on_ranks(program.ranks, lambda rank: _rank(program, rank))
    for result in results:
        if isinstance(result, BaseException):
            return Verdict("refused", f"set-up: {result}")
    stopped = [result for result in results if isinstance(result, _Stopped)]
    if any(each.stage == "eager" for each in stopped):
        return Verdict("refused", "; ".join(sorted({_brief(each.error) for each in stopped})))
    if stopped:
        return _failed(program, [each.error for each in stopped])
    whole = _whole(program) if program.has_whole() else None
    for rank, (eager, compiled) in enumerate(results):
        for name in sorted({*eager, *compiled}):
            if problem := _difference(eager.get(name), compiled.get(name)):
                return Verdict("mismatch", f"rank {rank}, {name}, eager and compiled: {problem}")
        if whole is not None:
            for name in sorted(set(whole) & set(eager)):
                if problem := _difference(whole[name], eager[name]):
                    return Verdict(
                        "mismatch", f"rank {rank}, {name}, one device and eager: {problem}"
                    )
    return Verdict("ok")


def _failed(program: Program, errors: Sequence[BaseException]) -> Verdict:
    """The compiled program failed: the first rank's own error, not that its peers wait for it."""
    own = [error for error in errors if not isinstance(error, Hang)]
    error = (own or list(errors))[0]
    if isinstance(error, (Hang, LaunchesDiffer)):
        return Verdict("hang", _brief(error))
    status = "break" if isinstance(error, Unsupported) else "crash"
    trace = "".join(traceback.format_exception(error))[-6000:]
    return Verdict(status, f"{_brief(error)}\n{trace}")


def _brief(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _difference(expected: torch.Tensor | None, found: torch.Tensor | None) -> str:
    if expected is None or found is None:
        one, other = ("missing" if each is None else "there" for each in (expected, found))
        return "" if expected is found else f"{one} and {other}"
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return f"{list(expected.shape)} {expected.dtype} and {list(found.shape)} {found.dtype}"
    return how_far(found, expected)


def namespace(
    program: Program,
    rank: int | str,
    *,
    whole: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The program's functions, as code that no other rank shares."""
    names = {**NAMES, **more}
    exec(compile(program.source(whole), f"<program {program.seed} rank {rank}>", "exec"), names)
    return names


def _rank(program: Program, rank: int) -> Any:
    names = tuple(f"d{dim}" for dim in range(len(program.mesh)))
    mesh = init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
    calls = ROWS if program.dynamic else ROWS[:1]
    eager: Seen = {}
    try:
        names = namespace(program, rank)
        for call, rows in enumerate(calls):
            eager |= _observe(program, names, mesh, rank, call, rows, lambda function: function)
    except Exception as error:
        return _Stopped("eager", error)
    settings = dict(program.settings)
    in_full = settings.pop("code", False)

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, fullgraph=True, dynamic=program.dynamic or None, **settings)

    seen: Seen = {}
    try:
        with contextlib.nullcontext() if in_full else graph_passes_only():
            names = namespace(program, rank)
            once: list[Callable[..., Any]] = []

            def same(function: Callable[..., Any]) -> Callable[..., Any]:
                once.append(compiled(function)) if not once else None
                return once[0]

            for call, rows in enumerate(calls):
                seen |= _observe(program, names, mesh, rank, call, rows, same)
    except Exception as error:
        return _Stopped("compiled", error)
    return eager, seen


def _observe(
    program: Program,
    names: dict[str, Any],
    mesh: Any,
    rank: int,
    call: int,
    rows: int,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> Seen:
    """Outputs, inputs as they are left, and gradients of one call, whole, as plain tensors by
    name.
    """
    inputs = {}
    for given in program.inputs:
        value = given.draw(program.seed, rank, rows)
        if given.placements and mesh is not None:
            placements = eval(given.placements, dict(NAMES))
            value = distribute_tensor(value, mesh, placements, src_data_rank=None).detach()
        inputs[given.name] = value.requires_grad_(given.grad)
    model = names["build"](mesh) if program.layers else None
    function = wrap(model if model is not None else names["step"])
    outputs = function(mesh, *inputs.values())
    seen = {f"call {call}, output {at}": out for at, out in enumerate(outputs)}
    if program.backward:
        leaves = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        if leaves:
            total = sum((_joined(out).double() ** 2).sum() for out in leaves)
            total.backward()
        parameters = dict(model.named_parameters()) if model is not None else {}
        for name, leaf in {**inputs, **parameters}.items():
            if leaf.grad is not None:
                seen[f"call {call}, gradient of {name}"] = leaf.grad
    buffers = dict(model.named_buffers()) if model is not None else {}
    seen |= {f"call {call}, buffer {name}": value for name, value in buffers.items()}
    seen |= {f"call {call}, input {name}": value for name, value in inputs.items()}
    return {name: _plain(value).detach().clone() for name, value in seen.items()}


def _joined(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _plain(value: torch.Tensor) -> torch.Tensor:
    value = _joined(value)
    # Explicitly waited for, a value has no gradient any more.
    return value.wait() if isinstance(value, fc.AsyncCollectiveTensor) else value


def _whole(program: Program) -> Seen | None:
    """The same on one device; None where only ranks accept it."""
    seen: Seen = {}
    try:
        names = namespace(program, "whole", whole=True)
        for call, rows in enumerate(ROWS if program.dynamic else ROWS[:1]):
            seen |= _observe(program, names, None, 0, call, rows, lambda function: function)
    except Exception:
        return None
    return seen


def prepare() -> None:
    """Once in a process that runs programs: the plugin on, one thread for computing."""
    # Ranks of one process share a store and a compile lock: their check would wait for itself.
    os.environ["INDUCTOR_PASSES_AGREEMENT_SECONDS"] = "0"
    torch.set_num_threads(1)
    without_timed_guards()
    dynamo_dist.enable()
