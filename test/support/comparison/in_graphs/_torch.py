"""Private torch names for the rows, seen in torch 2.13 to 2.15."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo import exc
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from dynamo_dist.torch_compat.dynamo_frames import SeenBreak, watch_dynamo
from inductor_passes.errors import ExplainedError


def forget() -> None:
    """Drop what was compiled, counted and decided before."""
    torch._dynamo.reset()
    counters.clear()
    _clear_sharding_prop_cache()
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator._propagate_tensor_meta_cached.cache_clear()


@contextlib.contextmanager
def quick_lowering() -> Iterator[None]:
    """Inductor calls torch's kernels where it would have C++ compiled, and keeps nothing on
    disk.
    """
    with config.patch(
        fallback_by_default=True,
        fx_graph_cache=False,
        fx_graph_remote_cache=False,
        compile_threads=1,
    ):
        yield


@contextlib.contextmanager
def graphs_and_breaks() -> Iterator[dict[str, Any]]:
    """Into what is given: how many graphs are compiled inside, and the breaks' texts.

    A function that Dynamo leaves to Python whole is a break too, which torch's counters lack.
    """
    record: dict[str, Any] = {}
    left: list[str] = []

    def on_break(seen: SeenBreak) -> None:
        if seen.falls_back:
            left.append(seen.message)

    try:
        with watch_dynamo(on_break, lambda compile_: None):
            yield record
    finally:
        record["graphs"] = counters["stats"]["unique_graphs"]
        counted = [str(text) for text, count in counters["graph_break"].items() if count]
        record["breaks"] = counted or left


def local_shape(value: DTensor) -> Any:
    """The shape of this rank's part as torch cuts shards; None where it does not say."""
    try:
        return compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )[0]
    except Exception:
        return None


# Of torch's own errors: that something is not done, and for whom.
SAID = re.compile(
    r"not supported today|does not currently support|is not supported for tensor subclasses"
    r"|got mixed torch.Tensor and DTensor|currently not supported|no rule registered for HOP"
)


def is_refusal(error: BaseException | None) -> bool:
    """Return whether an error, or one behind it, says what to do: Dynamo's own kinds of break,
    and this project's.
    """
    while error is not None:
        if isinstance(error, (exc.Unsupported, exc.UserError)):
            return True
        if isinstance(error, ExplainedError) or SAID.search(str(error)):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__
    return False
