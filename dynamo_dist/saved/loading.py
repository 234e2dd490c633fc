"""``dynamo_dist.load``: torch's caches filled from what ``save`` wrote."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from dynamo_dist.errors import ArtefactError
from dynamo_dist.saved import ahead, compiles, fingerprint, frames, owned
from dynamo_dist.saved.manifest import Artefacts, Manifest, name_of
from dynamo_dist.torch_compat.dynamo import compiler
from dynamo_dist.torch_compat.inductor import saved
from inductor_passes.reporting import recorder

log = logging.getLogger(__name__)
_MANIFEST = re.compile(r"rank-(\d+)-of-(\d+)\.json")


def load(path: str | os.PathLike[str]) -> Artefacts:
    """Fill torch's caches with what this rank of an earlier job has saved to the folder ``path``, before the first compile.

    Call it on each rank, after ``init_process_group`` and what you register (passes, strategies). A frame that was saved then runs **without being traced**
    where all that its trace depended on is the same: the files of its code, Dynamo's settings, and by content each value that a guard is on.
    Any other is traced, with a warning that names the guard or file. Graphs whose keys match are neither traced by AOTAutograd nor
    lowered by Inductor; reports say of them from where they were loaded.

    Raises ArtefactError, with what differs, where the artefacts are of another torch, Python, version of our sources, job
    or machine; a later compile raises it where its options or meshes are none of those that were saved
    (``options.schedule.effort: high -> default``). Raises it if torch's caches are off. A graph of a program that has changed is compiled, with a warning. Raises it too
    for a folder or file that is not this user's alone (they are pickles and machine code), truncated, or of a newer version; nothing is loaded then.

    Under ``python -m dynamo_dist precompile``, which makes artefacts, it loads none.
    """
    if ahead.folder() is not None:
        log.info("precompile: nothing is loaded from %s", path)
        return Artefacts.of(os.fspath(path), ())
    if off := saved.off():
        raise ArtefactError(
            f"What is loaded would not be used: torch's caches are off, by {off}.",
            "",
            "Turn them on.",
        )
    now = fingerprint.plain(fingerprint.of_process())
    prefix = name_of(now["job"]["rank"], now["job"]["world_size"])
    with owned.opened(path) as folder:
        manifest = _manifest(folder, prefix, now)
        lines = list(fingerprint.differences(manifest.fingerprint, now))
        if lines:
            raise _does_not_fit(folder.path, lines)
        where = os.path.join(folder.path, manifest.file)
        if os.path.basename(manifest.file) != manifest.file:
            raise ArtefactError(
                f"{where!r} lies outside the folder.", "", "Save the artefacts again."
            )
        try:
            content = folder.read(manifest.file)
        except FileNotFoundError:
            raise ArtefactError(
                f"{where!r} is not there.",
                "The folder was not copied whole.",
                "Copy it again, or save the artefacts again.",
            ) from None
    entries = list(manifest.cut(content, where))
    with compiler.compile_lock:
        try:
            saved.put(entries)
        except (OSError, ValueError) as error:
            raise ArtefactError(
                f"Cannot load {folder.path!r} into torch's caches: {error}.",
                "What got there is whole, and does no harm.",
                "Make room in TORCHINDUCTOR_CACHE_DIR, and see that it can be written.",
            ) from None
        recorder.loaded(folder.path, [each.name for each in entries])
        compiles.expect(folder.path, manifest.compiles)
        frames.take(folder.path, (each.content for each in entries if each.kind == saved.FRAME))
    artefacts = Artefacts.of(folder.path, entries)
    log.info("from cache: %s", artefacts)
    return artefacts


def _manifest(folder: owned.Folder, prefix: str, now: dict[str, Any]) -> Manifest:
    where = os.path.join(folder.path, f"{prefix}.json")
    try:
        text = folder.read(f"{prefix}.json").decode()
        return Manifest.from_json(text, where)
    except UnicodeDecodeError:
        raise ArtefactError(f"{where!r} is no text.", "", "Save the artefacts again.") from None
    except FileNotFoundError:
        pass
    found = [match for name in folder.names() if (match := _MANIFEST.fullmatch(name))]
    if not found:
        raise ArtefactError(
            f"{folder.path!r} holds no artefacts.",
            "",
            "Give the folder that dynamo_dist.save(path) wrote.",
        )
    sizes = sorted({int(match[2]) for match in found})
    if (size := now["job"]["world_size"]) not in sizes:
        raise _does_not_fit(folder.path, [f"job.world_size: {sizes[0]} -> {size}"])
    ranks = sorted(int(match[1]) for match in found if int(match[2]) == size)
    raise ArtefactError(
        f"{folder.path!r} holds no artefacts of rank {now['job']['rank']}, but of {ranks}.",
        "Each rank saves and loads its own.",
        "Call dynamo_dist.save(path) on all ranks; on hosts without a common folder each has its own ranks'.",
    )


def _does_not_fit(path: str, lines: list[str]) -> ArtefactError:
    return ArtefactError(
        f"The artefacts in {path!r} do not fit: {'; '.join(lines)}.",
        "What was saved stands left of the arrow, what is now right.",
        "Start as when they were saved, or compile without load() and save again.",
    )
