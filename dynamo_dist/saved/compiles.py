"""Options and meshes of this process' compiles: noted for ``save``, and held against what was loaded.

Which options a compile has is not known before it: ``load`` cannot compare them, so the compile does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dynamo_dist.errors import ArtefactError
from dynamo_dist.saved.fingerprint import differences, of_options
from dynamo_dist.torch_compat.inductor import saved
from inductor_passes.pass_options import PassOptions

log = logging.getLogger(__name__)

_noted: list[dict[str, Any]] = []
_loaded: list[dict[str, Any]] = []
_from: list[str] = []


def noted() -> list[dict[str, Any]]:
    """Options and meshes of the compiles so far, each once."""
    return list(_noted)


def expect(path: str, compiles: Sequence[dict[str, Any]]) -> None:
    """From now on compiles are to be as these, or as those of folders that were loaded before."""
    _from.append(path)
    _loaded.extend(compiles)


def has_loaded() -> bool:
    """Return whether artefacts were loaded in this process."""
    return bool(_loaded)


@contextlib.contextmanager
def noting(own: PassOptions, inductor: Mapping[str, Any], inputs: Sequence[Any]) -> Iterator[None]:
    """Note a compile. Raises ArtefactError if artefacts were loaded, and none is of such a compile; warns if it was none of them."""
    this = {"options": of_options(own, inductor), "meshes": meshes(inputs)}
    if _loaded:
        _check(this)
    if this not in _noted:
        _noted.append(this)
    before = saved.misses()
    yield
    if _loaded and saved.misses() > before:
        log.warning(
            "A graph was not among the artefacts of %s: it was compiled. The program, its shapes or "
            "an input have changed since they were saved; TORCH_LOGS=dist_passes says what of its key.",
            ", ".join(_from),
        )


def meshes(inputs: Sequence[Any]) -> list[str]:
    """Meshes among a graph's inputs, or of DTensors there, as text."""
    found = set()
    for each in inputs:
        mesh = each.device_mesh if isinstance(each, DTensor) else getattr(each, "real_obj", each)
        if isinstance(mesh, DeviceMesh):
            sizes = " x ".join(map(str, mesh.shape))
            found.add(f"{mesh.device_type} {sizes} {mesh.mesh_dim_names or ''}".strip())
    return sorted(found)


def _check(this: dict[str, Any]) -> None:
    lines = min(
        (list(differences(each["options"], this["options"], "options")) for each in _loaded),
        key=len,
    )
    known = sorted({mesh for each in _loaded for mesh in each["meshes"]})
    if not lines and not set(this["meshes"]) <= set(known):
        lines = list(differences(known, this["meshes"], "meshes"))
    if lines:
        raise ArtefactError(
            f"The artefacts of {', '.join(_from)} are not of this compile: {'; '.join(lines)}.",
            "It would compile anew, which who loads artefacts does not want.",
            "Compile as when they were saved, save them again, or do not load them.",
        )
