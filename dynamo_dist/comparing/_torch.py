"""Private torch names that comparing needs: counting and meeting."""

from __future__ import annotations

from typing import Any


def unique_graphs() -> int:
    """Graphs that Dynamo has captured in this process so far. Seen in torch 2.11 to 2.15."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def default_store() -> Any:
    """The store of the default process group, which must be initialised. Seen in 2.11 to 2.15."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
