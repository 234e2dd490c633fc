"""One rank of one side: runs rows by name, writes what became of each and the values that it found.

``python rank.py FOLDER SIDE ROW...`` in a job of ranks. Leaves with status 3 after a row that ranks ended otherwise
than each other, so that the rows behind it start in new processes.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import io
import json
import logging
import math
import os
import sys
import threading
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from comparison.in_graphs import _torch
from comparison.in_graphs.row import Row, known
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

ROW_S = 20
PEERS_S = 25


def main() -> None:
    """Run the rows that are named, one behind the other."""
    folder, side, *names = Path(sys.argv[1]), *sys.argv[2:]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=12))
    rank = dist.get_rank()
    if side in ("ours", "plugin"):
        import dynamo_dist

        dynamo_dist.enable()
    rows = known()
    ended = dist.FileStore(str(folder / f"ended{os.environ['MASTER_PORT']}"), dist.get_world_size())
    ended.set_timeout(datetime.timedelta(seconds=PEERS_S))
    gc.collect()
    gc.freeze()
    gc.disable()
    for name in names:
        print(f"-- {name}", flush=True)
        over = threading.Timer(ROW_S, _give_up, [folder, side, name, rank])
        over.daemon = True
        over.start()
        record, found = _run(rows[name], side, rank)
        over.cancel()
        torch.save(found, folder / f"{side}.{name}.{rank}.pt")
        _write(folder, side, name, rank, record)
        said = f"{record['status']} {record['why'][:80]}"
        ended.set(f"{name}{rank}", said)
        try:
            others = {ended.get(f"{name}{r}") for r in range(dist.get_world_size())}
        except Exception:  # one of them has died or hangs
            others = set()
        if len(others) != 1 or b"imed out" in next(iter(others)):
            os._exit(3)
    os._exit(0)


def _write(folder: Path, side: str, name: str, rank: int, record: dict[str, Any]) -> None:
    (folder / f"{side}.{name}.{rank}.json").write_text(json.dumps(record))


def _give_up(folder: Path, side: str, name: str, rank: int) -> None:
    _write(folder, side, name, rank, {"status": "hang", "why": f"no end after {ROW_S} s"})
    os._exit(3)


def _run(row: Row, side: str, rank: int) -> tuple[dict[str, Any], Any]:
    """How a row ended on this rank: its record, and its values."""
    _torch.forget()
    with _torch.graphs_and_breaks() as seen:
        record, found = _ended(row, side, rank)
    return record | seen, found


def _ended(row: Row, side: str, rank: int) -> tuple[dict[str, Any], Any]:
    found: list[Any] = []
    record: dict[str, Any] = {"status": "ok", "why": ""}
    said = io.StringIO()
    names = ("dp", "tp")[-len(row.sizes) :]
    try:
        mesh = init_device_mesh("cpu", row.sizes, mesh_dim_names=names)
        torch.manual_seed(0)
        program, calls = row.build(mesh, rank)
        function, step = program if isinstance(program, tuple) else (program, None)
        with contextlib.redirect_stdout(said), _torch.quick_lowering():
            call = _compiled(row, side, function)
            for args in calls if isinstance(calls, list) else [calls]:
                leaves = _gathered(step(call, *args) if step else call(*args))
                if row.trained:
                    _train(leaves)
                found.append(_values(leaves))
            found.append(_values(_state(function, calls)))
        found.append(said.getvalue())
    except BaseException as error:
        record = {"status": "error", **_said_of(error)}
        traceback.print_exc()
    return record, found


def _compiled(row: Row, side: str, function: Any) -> Any:
    if side in ("eager", "plugin"):
        return function
    lowered = "inductor" if side == "stock" else "dynamo_dist"
    backend = lowered if row.backend == "lowered" else "aot_eager"
    return torch.compile(function, backend=backend, dynamic=row.dynamic)


def _whole(value: DTensor) -> torch.Tensor:
    """The full tensor; this rank's part where ranks hold others than a shape says, or are told other shapes."""
    local = value._local_tensor
    if hasattr(local, "whole"):
        return local.whole()  # type: ignore[no-any-return]
    flags: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(flags, (_is_as_chunk(value), tuple(value.shape)))
    return value.full_tensor() if flags[0][0] and len(set(flags)) == 1 else local


def _is_as_chunk(value: DTensor) -> bool:
    shape = _torch.local_shape(value)
    return shape is None or tuple(shape) == tuple(value._local_tensor.shape)


def _gathered(out: Any) -> list[Any]:
    """Leaves of what a call gave, each with its class; a DTensor is made whole once, for its numbers and its gradient."""
    found: list[Any] = []
    for each in pytree.tree_leaves(out):
        if isinstance(each, DTensor):
            found += [type(each).__name__, _whole(each)]
        else:
            found += _values([each], detach=False)
    return found


def _train(leaves: list[Any]) -> None:
    losses = [
        (
            each * torch.linspace(0.5, 1.5, max(each.numel(), 1))[: each.numel()].view(each.shape)
        ).sum()
        for each in leaves
        if isinstance(each, torch.Tensor) and each.requires_grad
    ]
    if losses:
        torch.stack(losses).sum().backward()


def _state(function: Any, calls: Any) -> list[Any]:
    """Arguments and parameters behind the calls, and their gradients."""
    leaves: list[Any] = []
    for each in pytree.tree_leaves([function, calls]):
        if isinstance(each, nn.Module):
            leaves += [*each.parameters(), *each.buffers()]
        elif not callable(each):
            leaves.append(each)
    grads = [each.grad for each in leaves if isinstance(each, torch.Tensor) and each.is_leaf]
    return [leaves, grads]


def _values(tree: Any, *, detach: bool = True) -> list[Any]:
    """Leaves as plain tensors and values; of a tensor also its class."""
    found: list[Any] = []
    for each in pytree.tree_leaves(tree):
        if isinstance(each, DTensor):
            found += [type(each).__name__, _whole(each).detach().clone()]
        elif isinstance(each, torch.Tensor):
            whole = each.whole() if hasattr(each, "whole") else each  # type: ignore[attr-defined]
            kind = "Tensor" if type(each) is not nn.Parameter else "Parameter"
            found += [kind, whole.detach().clone() if detach else whole]
        elif isinstance(each, float) and math.isfinite(each):
            found.append(torch.tensor(each))
        else:
            found.append(each if isinstance(each, (int, str, bool, type(None))) else repr(each))
    return found


def _said_of(error: BaseException) -> dict[str, Any]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return {
        "why": f"{type(error).__name__}: {' '.join(lines[:3])[:400]}",
        "refuses": _torch.is_refusal(error),
    }


if __name__ == "__main__":
    main()
