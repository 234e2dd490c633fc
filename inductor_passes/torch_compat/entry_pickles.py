"""Entries of AOTAutograd's cache that another rank of this job has made.

They are pickles, as torch's own caches are, and run what they hold. One is read that came through the job's store, where
ranks put nothing but what they compiled, under a digest that its maker announced there.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping

from torch.distributed.device_mesh import DeviceMesh

from inductor_passes.torch_compat.caches import traced_entries_of
from inductor_passes.torch_compat.meshes import unpickled_as


def put_own_entry(key: str, entry: bytes, meshes: Mapping[str, DeviceMesh]) -> None:
    """Put an entry of another rank into the cache under this one's key, with this one's ``meshes`` in it, by what they hold.

    Raises UnknownMeshError, OSError, and whatever a damaged entry makes of its own bytes.
    """
    from torch._inductor.codecache import sha256_hash, write_atomic

    with unpickled_as(meshes):
        content = pickle.dumps(pickle.loads(entry))
    write_atomic(
        os.path.join(traced_entries_of(key), sha256_hash(content)), content, make_dirs=True
    )
