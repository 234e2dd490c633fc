"""Whether a call that eager answers can be compiled; on one rank, whose collectives move
nothing.
"""

from __future__ import annotations

import contextlib
import warnings

import torch
from comparison.strategies.layouts import Layout
from comparison.strategies.samples import Sample
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dynamo_dist.numerics.ranks import local_shape_on


def problem(sample: Sample, mesh: DeviceMesh, layout: Layout) -> str:
    """The error of the compiled call where eager has none, or nothing. Graph breaks are no
    errors.
    """

    def call() -> list[object]:
        placements = iter(layout)

        def part(whole: torch.Tensor) -> DTensor:
            at = next(placements)
            shape = local_shape_on(whole.shape, mesh.shape, at, 0)
            local = whole[tuple(slice(length) for length in shape)].clone()
            return DTensor.from_local(
                local, mesh, at, run_check=False, shape=whole.shape, stride=whole.stride()
            )

        args, kwargs = pytree.tree_map_only(torch.Tensor, part, (sample.args, sample.kwargs))
        return pytree.tree_leaves(run(*args, **kwargs))

    def run(*args: object, **kwargs: object) -> object:
        return sample.function(*args, **kwargs)

    with warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception:
            return ""  # of eager, and judged there
        torch._dynamo.reset()
        run = torch.compile(run, backend="aot_eager", dynamic=False)
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
    return ""
