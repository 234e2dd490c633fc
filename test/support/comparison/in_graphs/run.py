"""Rows on real ranks: jobs of one side, started anew behind a row that a job did not survive."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import preloaded
import torch
from comparison.in_graphs.outcome import judged, said
from comparison.in_graphs.row import Row

RANK = Path(__file__).with_name("rank.py")
# Whose eager mode is the truth, by which it is replaced where it raises, and the two that compile.
SIDES = ("eager", "plugin", "stock", "ours")
JOB_S = 1500
DIED = {"status": "crash", "why": "the process died", "graphs": 0, "breaks": []}


def run(rows: dict[str, Row], folder: Path, sides: tuple[str, ...] = SIDES) -> None:
    """Run rows on each side; what became of them lies in ``folder``."""
    for side in sides:
        for ranks in sorted({row.ranks for row in rows.values()}):
            names = [name for name, row in rows.items() if row.ranks == ranks]
            if side == "plugin":
                names = [
                    name
                    for name in names
                    if rows[name].truth == "plugin" or not _is_ok(folder, "eager", name, ranks)
                ]
            _run_job(names, side, ranks, folder)


def _run_job(names: list[str], side: str, ranks: int, folder: Path) -> None:
    left = list(names)
    while left:
        for name in left:
            for rank in range(ranks):
                (folder / f"{side}.{name}.{rank}.json").unlink(missing_ok=True)
        variables = {
            "OMP_NUM_THREADS": "1",
            "DYNAMO_DIST_AGREEMENT_SECONDS": "10",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        _, log = preloaded.run_ranks(
            RANK, ranks, [str(folder), side, *left], variables, folder=folder, timeout_s=JOB_S
        )
        with (folder / f"{side}.log").open("a") as file:
            file.write(log)
        done = [n for n in left if all(_path(folder, side, n, r).exists() for r in range(ranks))]
        begun = left[len(done)] if len(done) < len(left) else None
        if begun and (
            not done
            or any(_path(folder, side, begun, r).exists() for r in range(ranks))
            or f"-- {begun}\n" in log
        ):
            for rank in range(ranks):
                if not (path := _path(folder, side, begun, rank)).exists():
                    path.write_text(json.dumps(DIED))
            done.append(begun)
        print(f"{side}, {ranks} ranks: {len(done)} rows", file=sys.stderr, flush=True)
        left = [name for name in left if name not in done]


def _path(folder: Path, side: str, name: str, rank: int) -> Path:
    return folder / f"{side}.{name}.{rank}.json"


def _records(folder: Path, side: str, name: str, ranks: int) -> list[dict[str, Any]]:
    paths = [_path(folder, side, name, rank) for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def _values(folder: Path, side: str, name: str, ranks: int) -> list[Any]:
    paths = [folder / f"{side}.{name}.{rank}.pt" for rank in range(ranks)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def _is_ok(folder: Path, side: str, name: str, ranks: int) -> bool:
    found = _records(folder, side, name, ranks)
    return len(found) == ranks and all(each["status"] == "ok" for each in found)


def results(rows: dict[str, Row], folder: Path) -> dict[str, Any]:
    """By row: whose eager mode is its truth, what that says where it raises, and the classes of sides that ran."""
    found: dict[str, Any] = {}
    for name, row in rows.items():
        truths = ("eager", "plugin") if row.truth == "eager" else ("plugin",)
        truth = next((s for s in truths if _is_ok(folder, s, name, row.ranks)), None)
        right = _values(folder, truth, name, row.ranks) if truth else None
        each: dict[str, Any] = {"truth": truth or "none"}
        if truth != "eager":
            each["eager"] = said(_records(folder, "eager", name, row.ranks)[0]["why"])
        for side in ("stock", "ours"):
            if records := _records(folder, side, name, row.ranks):
                each[side] = judged(records, _values(folder, side, name, row.ranks), right)
        found[name] = each
    return found
