"""``dynamo_dist.save``: this rank's compiled artefacts to a folder."""

from __future__ import annotations

import logging
import os

from dynamo_dist.errors import ArtefactError
from dynamo_dist.saved import ahead, compiles, fingerprint, frames, owned
from dynamo_dist.saved.manifest import Artefacts, Manifest, name_of
from dynamo_dist.torch_compat.dynamo import compiler
from dynamo_dist.torch_compat.inductor import saved
from inductor_passes.files.whole import TEMPORARY
from inductor_passes.reporting import recorder

log = logging.getLogger(__name__)


def save(path: str | os.PathLike[str]) -> Artefacts:
    """Write what this process has compiled, or loaded from caches, to the folder ``path``: a later job starts from it by ``load``.

    Call it on each rank of the job, after a whole step; ranks do not wait for one another. A rank writes two files:
    ``rank-R-of-N.json``, with a fingerprint of what they fit (torch, Python, our sources, options, plugins, ranks, meshes,
    devices, vector units), and what it names: AOTAutograd's and Inductor's cache entries, C++ libraries that were loaded, the
    records of reports. Each is whole or absent; saved again, they take the place of this rank's earlier ones.

    ``path`` is made readable by this user alone. Raises ArtefactError if nothing was compiled, if others can write the
    folder, and if it cannot be written (a full disk): what was saved there before is then as it was.

    Under ``python -m dynamo_dist precompile`` it writes to the folder that the command was given, and ends the script.
    """
    if (given := ahead.folder()) is None:
        return written(path)
    raise ahead.Ended(written(given))


def written(path: str | os.PathLike[str]) -> Artefacts:
    """``save``, wherever the process runs."""
    with compiler.compile_lock:
        facts, done = fingerprint.of_process(), compiles.noted()
        entries = saved.recorded() if done else []
        if not entries:
            raise _nothing(bool(done))
        entries += saved.files(recorder.met())
        kept = frames.kept()
        entries += [saved.Entry(saved.FRAME, each.name(), each.dumps()) for each in kept]
    prefix = name_of(facts["job"]["rank"], facts["job"]["world_size"])
    content = b"".join(each.content for each in entries)
    manifest = Manifest.of(prefix, facts, done, content, entries)
    with owned.opened(path, make=True) as folder:
        folder.write(manifest.file, content)
        try:
            folder.write(f"{prefix}.json", manifest.to_json().encode())
        except ArtefactError:
            if manifest.file not in _named_by(folder, prefix):
                folder.remove(manifest.file)
            raise
        for name in folder.names():  # of an earlier save, or of one that was killed
            is_old = name.startswith(f"{prefix}.") and name.endswith(".bin")
            if (is_old and name != manifest.file) or name.startswith(f"{TEMPORARY}{prefix}."):
                folder.remove(name)
    artefacts = Artefacts.of(folder.path, entries)
    log.info("saved: %s", artefacts)
    for each in kept:
        if each.because:
            log.warning(
                "A job that loads %s traces %s again, because of %s.",
                folder.path,
                each.where,
                each.because,
            )
    if left_out := saved.bypassed():
        log.warning(
            "AOTAutograd's cache does not keep %d of the compiled graphs: a job that loads %s traces them "
            "again, and finds Inductor's code for them.",
            left_out,
            folder.path,
        )
    return artefacts


def _named_by(folder: owned.Folder, prefix: str) -> str:
    try:
        return folder.read(f"{prefix}.json").decode(errors="replace")
    except (OSError, ArtefactError):
        return ""


def _nothing(has_compiled: bool) -> ArtefactError:
    if has_compiled:
        return ArtefactError(
            "There is nothing to save: torch's caches have no graph of this process.",
            f"Caches are off, by {off}."
            if (off := saved.off())
            else "They cannot keep these graphs.",
            "Turn them on, or see TORCH_LOGS=dist_passes for why a graph is not kept.",
        )
    return ArtefactError(
        "There is nothing to save: this process has compiled nothing.",
        'Artefacts are of graphs that backend="dynamo_dist" has compiled.',
        "Run a whole step of the compiled program first: forward and backward.",
    )
