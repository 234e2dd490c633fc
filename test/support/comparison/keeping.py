"""Records of programs on disk: a run resumes, and its parts add up.

Upstream's records hold for a version of torch, ours for the last commit that changed a package.
Both hold for the programs as they are: a digest of their sources is in the name of a file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from comparison.outcome import End

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PACKAGES = ("dynamo_dist", "inductor_passes")


class Kept:
    """The records in ``folder``; without one, those of this run alone."""

    def __init__(self, folder: Path | None) -> None:
        self._own = tempfile.TemporaryDirectory() if folder is None else None
        self._folder = Path(self._own.name) if self._own else folder or Path()
        self.commit = _commit()

    def read(self, part: str, side: str) -> dict[str, End]:
        path = self._path(part, side)
        lines = path.read_text().splitlines() if path.exists() else []
        found = map(json.loads, lines)
        return {record.pop("name"): End.from_json(record) for record in found}

    def add(self, part: str, side: str, name: str, end: End) -> None:
        path = self._path(part, side)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as out:
            out.write(json.dumps({"name": name, **end.to_json()}) + "\n")

    def _path(self, part: str, side: str) -> Path:
        version = torch.__version__.split("+")[0]
        of = f"upstream_{version}" if side == "upstream" else f"{self.commit}_{version}"
        return self._folder / of / f"{part}_{_digest()}.jsonl"


def add_figures(path: Path, result: dict[str, Any]) -> None:
    """Put the figures of a run into the file; parts that did not run keep what it has."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**kept, **result["parts"]}, indent=1) + "\n")


def _commit() -> str:
    """The last commit that changed a package; with changes that are not committed, a digest of
    them too.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    changes = git("diff", "HEAD", "--", *PACKAGES)
    name = git("log", "-1", "--format=%h", "--", *PACKAGES).strip() or "unknown"
    return f"{name}+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else name


@functools.cache
def _digest() -> str:
    """Of the sources of all programs."""
    sources = [*HERE.rglob("*.py"), *(ROOT / "test" / "corpus").glob("*.py")]
    text = b"".join(path.read_bytes() for path in sorted(sources))
    return hashlib.sha256(text).hexdigest()[:8]
