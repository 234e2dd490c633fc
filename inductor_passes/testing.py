"""Small graphs for tests: trace a function on a fake process group, print a graph as readable
lines.

Nothing here runs a kernel or moves a byte: tensors are fake, the group is fake, a trace takes
milliseconds. A fake group answers questions about ranks; its collectives carry no numbers.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from inductor_passes.graph.printing import dump as dump
from inductor_passes.torch_compat.aot import fake_tensor_mode, run_on_local_tensors
from inductor_passes.torch_compat.c10d import init_fake_group
from inductor_passes.torch_compat.nodes import overload_packet


@contextlib.contextmanager
def fake_group(world_size: int = 8, rank: int = 0) -> Iterator[None]:
    """Inside, ``world_size`` fake ranks are initialised and this process is ``rank``.

    The default group bears the name ``"0"``. Raises RuntimeError if a group is initialised already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "fake_group() needs to own the default process group, but one is initialised. "
            "Call torch.distributed.destroy_process_group() first."
        )
    init_fake_group(world_size, rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


def leave_process(status: int = 0) -> NoReturn:
    """End a rank's program: its process groups first, then the process, with ``status`` to its
    parent.

    A gloo thread that drops its last tensor while the interpreter is being torn down aborts the
    process (signal 6), rarely and after all work is done. So the interpreter is not torn down: what
    was printed is flushed, exit handlers do not run. Call it as the last statement of a script.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


def trace(
    fn: Callable[..., object],
    *shapes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    dynamic: bool = False,
    world_size: int = 8,
) -> fx.Graph:
    """Trace ``fn`` to an aten graph; every node carries its fake value in ``meta["val"]``.

    ``fn`` gets one tensor of ``dtype`` per entry of ``shapes`` (local shapes). With ``dynamic``
    every size above 1 is a symbol, hinted by the given size; that takes ``device="cpu"``. Uses the
    process group that is initialised; if there is none, a fake one of ``world_size`` ranks for the
    trace alone.
    """
    with contextlib.ExitStack() as stack:
        if not dist.is_initialized():
            stack.enter_context(fake_group(world_size))
        if dynamic:
            if device != "cpu":
                raise ValueError(f"dynamic=True traces cpu tensors only, got device={device!r}.")
            inputs = [torch.empty(tuple(shape), dtype=dtype) for shape in shapes]
            return make_fx(fn, tracing_mode="symbolic")(*inputs).graph
        with fake_tensor_mode():
            inputs = [torch.empty(tuple(shape), dtype=dtype, device=device) for shape in shapes]
        return make_fx(fn, tracing_mode="fake")(*inputs).graph


def run_on_ranks(graph: fx.Graph, *inputs: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the graph's results on each rank, with collectives that move true numbers, in one
    process.

    ``inputs`` has one entry for each graph input: its local value on every rank. Needs a fake group
    of as many ranks to be initialised.
    """
    return run_on_local_tensors(
        fx.Interpreter(fx.GraphModule({}, graph)).run,
        dist.get_world_size(),
        [dict(enumerate(of_ranks)) for of_ranks in inputs],
    )


class FixedCost:
    """A cost model for tests: microseconds by op name, one duration for every launch.

    ``FixedCost(launch=8.0, mm=10.0)`` prices each ``aten.mm`` at 10 and each collective at 8;
    every other node is free.
    """

    name = "fixed"

    def __init__(self, launch: float = 8.0, **compute: float) -> None:
        self._launch = launch
        self._compute = compute

    def compute_us(self, node: fx.Node) -> float:
        packet = overload_packet(node.target)
        return 0.0 if packet is None else self._compute.get(packet.__name__, 0.0)

    def launch_us(self, launch: fx.Node) -> float:
        return self._launch

    def link_us(self, launch: fx.Node, payload_bytes: Sequence[float]) -> float:
        return self._launch * len(payload_bytes)

    copy_bytes_per_us = 1e6
    compute_stretch = 1.0

    def digest(self) -> str:
        return f"{self._launch} {sorted(self._compute.items())}"
