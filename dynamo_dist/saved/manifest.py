"""What says of one rank's saved artefacts what they are and what they fit: a JSON file beside them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dynamo_dist.errors import ArtefactError
from dynamo_dist.torch_compat.inductor.saved import KINDS, Entry
from inductor_passes.files import Form, checked, parsed

FORMAT = 1
IS = "dynamo_dist artefacts"
_FIX = "Save the artefacts again."
_STRING = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_FORM = Form(
    name="artefacts' manifest",
    error=ArtefactError,
    fix=_FIX,
    schema={
        "type": "object",
        "required": ["is", "format", "fingerprint", "compiles", "file", "sha256", "entries"],
        "properties": {
            "is": {"const": IS},
            "format": {"const": FORMAT},
            "fingerprint": {"type": "object"},
            "compiles": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["options", "meshes"],
                    "properties": {
                        "options": {"type": "object"},
                        "meshes": {"type": "array", "items": _STRING},
                    },
                },
            },
            "file": _STRING,
            "sha256": _STRING,
            "entries": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["kind", "name", "bytes"],
                    "properties": {
                        "kind": {"enum": list(KINDS)},
                        "name": _STRING,
                        "bytes": _COUNT,
                    },
                },
            },
        },
    },
)


@dataclass(frozen=True, slots=True)
class Artefacts:
    """What ``save`` wrote or ``load`` put into the caches, of this rank.

    ``path``: the folder. ``graphs``: that Inductor has compiled. ``entries``, ``bytes``: all that was written.
    """

    path: str
    graphs: int
    entries: int
    bytes: int

    def __str__(self) -> str:
        return (
            f"{self.graphs} compiled graphs, {self.entries} entries, {self.bytes / 2**20:.1f} MiB "
            f"({self.path})"
        )

    @classmethod
    def of(cls, path: str, entries: Iterable[Entry]) -> Artefacts:
        """Count entries."""
        held = list(entries)
        graphs = len({each.name for each in held if each.kind == "inductor"})
        return cls(path, graphs, len(held), sum(len(each.content) for each in held))


@dataclass(frozen=True, slots=True)
class Manifest:
    """``fingerprint``: of the process that saved. ``compiles``: options and meshes of each compile. ``file``: the entries, end to end.

    ``entries``: kind, name and length of each.
    """

    fingerprint: dict[str, Any]
    compiles: tuple[dict[str, Any], ...]
    file: str
    sha256: str
    entries: tuple[Mapping[str, Any], ...]

    def to_json(self) -> str:
        return json.dumps({"is": IS, "format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Inverse of ``to_json``. Raises ArtefactError, naming ``where``, for anything else."""
        data = parsed(text, where, _FORM)
        held = data if isinstance(data, dict) else {}
        if held.get("is") == IS and held.get("format") != FORMAT:
            raise ArtefactError(
                f"{where!r} has format {held.get('format')!r}, and this version reads {FORMAT}.",
                "Another version of dynamo_dist wrote it.",
                "Load it with that version, or save the artefacts again.",
            )
        checked(data, _FORM, where)
        return cls(
            data["fingerprint"],
            tuple(data["compiles"]),
            data["file"],
            data["sha256"],
            tuple(data["entries"]),
        )

    @classmethod
    def of(
        cls,
        prefix: str,
        facts: dict[str, Any],
        compiles: Iterable[dict[str, Any]],
        content: bytes,
        entries: Iterable[Entry],
    ) -> Manifest:
        """Make one. ``content`` goes to the file that it names, whose name has a digest of it."""
        digest = hashlib.sha256(content).hexdigest()
        listed = tuple(
            {"kind": each.kind, "name": each.name, "bytes": len(each.content)} for each in entries
        )
        return cls(facts, tuple(compiles), f"{prefix}.{digest[:12]}.bin", digest, listed)

    def cut(self, content: bytes, where: str) -> Iterator[Entry]:
        """Entries of what ``file`` holds. Raises ArtefactError if that is not what was saved."""
        lengths = [each["bytes"] for each in self.entries]
        if len(content) != sum(lengths):
            raise ArtefactError(
                f"{where!r} has {len(content)} bytes, and {sum(lengths)} were saved.",
                "It was not written or copied to its end, or is another file.",
                _FIX,
            )
        if hashlib.sha256(content).hexdigest() != self.sha256:
            raise ArtefactError(
                f"{where!r} does not hold what was saved.", "Its digest is another one.", _FIX
            )
        start = 0
        for each, length in zip(self.entries, lengths, strict=True):
            yield Entry(each["kind"], each["name"], content[start : start + length])
            start += length


def name_of(rank: int, world_size: int) -> str:
    """Return what a rank's files begin with."""
    return f"rank-{rank}-of-{world_size}"
