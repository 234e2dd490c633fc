"""What a device mesh holds, apart from this process's place in it; and meshes in what another
rank has pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

# Made of others, or without meaning in another process.
_NOT_CONTENT = ("_hash", "_pg_registry")
# This process's place in it, which a graph that is traced has as numbers.
_OF_THE_RANK = ("_rank", "_coordinate_on_dim", "_dim_group_names")


# A ContextVar: torch's pickler of cache keys calls ``content`` with a mesh and nothing else.
_of_all_ranks: ContextVar[bool] = ContextVar("of_all_ranks", default=False)


@contextlib.contextmanager
def without_places() -> Iterator[None]:
    """``content`` leaves out this process's place in the block, whatever is asked."""
    token = _of_all_ranks.set(True)
    try:
        yield
    finally:
        _of_all_ranks.reset(token)


def content(mesh: DeviceMesh, *, of_rank: bool = True) -> str:
    """Return all that a mesh holds, as text that is the same in every process of this rank: layout,
    groups, coordinate.

    Without ``of_rank``, the same in every process of the job: Inductor compiles what was traced
    with the mesh before.

    A submesh and its root hold each other: a mesh that was met before is its number.
    """
    met: dict[int, int] = {}
    of_rank = of_rank and not _of_all_ranks.get()
    left_out = _NOT_CONTENT if of_rank else (*_NOT_CONTENT, *_OF_THE_RANK)

    def text(value: object) -> str:
        if isinstance(value, DeviceMesh):
            if id(value) in met:
                return f"mesh {met[id(value)]}"
            met[id(value)] = len(met)
            # All attributes but those named: a field that a later torch adds is part of the key,
            # and not silently left out.
            held = {name: each for name, each in vars(value).items() if name not in left_out}
            return f"{type(value).__qualname__} {text(held)}"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {text(value[key])}" for key in sorted(value)) + "}"
        return repr(value.tolist() if isinstance(value, torch.Tensor) else value)

    return text(mesh)


def mesh_of(value: object) -> DeviceMesh | None:
    """Return a mesh, or the mesh that an input of a graph wraps; None for anything else.

    ``FakeScriptObject.real_obj`` was seen in 2.12 to 2.14.
    """
    inner = getattr(value, "real_obj", value)
    return inner if isinstance(inner, DeviceMesh) else None


class UnknownMeshError(Exception):
    """A pickled mesh that this process has none like."""


@contextlib.contextmanager
def unpickled_as(own: Mapping[str, DeviceMesh]) -> Iterator[None]:
    """Within it, a mesh that another rank has pickled is this process's mesh of the same content
    (without ``of_rank``).

    ``DeviceMesh.__setstate__`` and ``_root_mesh`` were seen in 2.11 to 2.14. Raises
    UnknownMeshError where there is none.
    """
    known = dict(own)
    for mesh in own.values():
        root = vars(mesh).get("_root_mesh")
        if isinstance(root, DeviceMesh):  # of a submesh, which holds it
            known[content(root, of_rank=False)] = root
    owner: Any = DeviceMesh
    upstream = owner.__dict__.get("__setstate__")

    def set_state(self: DeviceMesh, state: dict[str, Any]) -> None:
        # The state first, because ``content`` reads it to find this process's mesh that is like it.
        vars(self).update(state)
        mine = known.get(content(self, of_rank=False))
        if mine is None:
            raise UnknownMeshError(str(self))
        vars(self).clear()
        vars(self).update(vars(mine))

    owner.__setstate__ = set_state
    try:
        yield
    finally:
        if upstream is None:
            del owner.__setstate__
        else:
            owner.__setstate__ = upstream


def spec_of(value: object) -> Any:
    """The layout of a DTensor; None of anything else."""
    return value._spec if isinstance(value, DTensor) else None


def local_of(value: Any) -> Any:
    """The local tensor of a DTensor; anything else as it is."""
    return value._local_tensor if isinstance(value, DTensor) else value
