"""For tests of programs that use this package, ours among them: no GPU, no second process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dynamo_dist.torch_compat import dynamo_frames


@contextlib.contextmanager
def fake_mesh(
    *sizes: int,
    names: tuple[str, ...] | None = None,
    rank: int = 0,
    device_type: str = "cpu",
) -> Iterator[DeviceMesh]:
    """A mesh of the given sizes (8 ranks by default) on a fake process group, gone after the block.

    Collectives of a fake group return at once and move nothing: an all_reduce is the identity.
    Raises RuntimeError if a process group is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "fake_mesh() makes its own process group, but one is initialised already."
        )
    sizes = sizes or (8,)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        yield init_device_mesh(device_type, sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def count_graph_breaks(fn: Callable[..., object], *args: object, **kwargs: object) -> int:
    """Compile ``fn`` afresh, call it once, and count its graph breaks and its failed compiles.

    The graphs are run as traced, by no compiler. 0 means that all of ``fn`` is in one graph, under
    whatever is enabled at the moment.
    """
    breaks: list[object] = []

    def as_traced(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        return graph.forward

    with dynamo_frames.watch_dynamo(
        breaks.append,
        lambda compiled: (
            breaks.append(compiled) if compiled.failure and not compiled.reported else None
        ),
    ):
        torch.compile(fn, backend=as_traced)(*args, **kwargs)
    return len(breaks)
