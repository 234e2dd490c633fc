"""Work that is in flight: what a launch returns, in the graph and outside.

A launch is told apart from its end. ``launched`` are the results of functional collectives that nobody
has waited for, ``outputs`` the buffers that the program passed in, and ``finish(launched, outputs)`` waits
and copies. Traced, ``start`` is a ``WorkVariable`` whose ``wait()`` traces ``finish`` right there; a Work
that leaves the graph is a ``GraphWork``, which calls the same function. It is made and waited for where Dynamo
may look at every frame, so it keeps Dynamo out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.trace.lowering.state import next_serial

Finish = Callable[[list[torch.Tensor], list[torch.Tensor]], None]


class GraphWork(dist.Work):
    """A Work launched by a compiled function; ``wait()`` fills the buffers it was launched for."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(
        self,
        finish: Finish | None = None,
        launched: list[torch.Tensor] | None = None,
        outputs: list[torch.Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._finish, self._launched, self._outputs = finish, launched or [], outputs or []

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self, timeout: Any = None) -> bool:
        """Wait, without a deadline of its own: ``timeout`` is that of the process group. True."""
        if (finish := self._finish) is not None:
            self._finish = None
            finish(self._launched, self._outputs)
            self._launched = []
        return True

    def is_completed(self) -> bool:
        """True: asking waits, since a compiled program cannot be told of progress."""
        return self.wait()

    def is_success(self) -> bool:
        """True: asking waits, and a failed wait raises."""
        return self.wait()

    def exception(self) -> None:
        """None: a failed wait raises."""
        self.wait()

    def synchronize(self) -> None:
        """The same as ``wait()``."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """The output buffers, filled."""
        self.wait()
        return self._outputs

    def get_future(self) -> GraphFuture:
        """A future of the output buffers."""
        return GraphFuture(self)


class GraphFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a ``GraphWork``, or of a callback on one."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __init__(
        self, of: GraphWork | GraphFuture, callback: Callable[[Any], Any] | None = None
    ) -> None:
        super().__init__()
        self._of, self._callback = of, callback

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def wait(self) -> Any:
        """Return the value of the collective, or of the callback. A callback runs once, at the first ask."""
        if not super().done():
            self._of.wait()
            if self._callback is not None:
                self.set_result(self._callback(self._of))
            else:
                self.set_result(self._of.result() if isinstance(self._of, GraphWork) else None)
        return super().wait()

    def value(self) -> Any:
        """The same as ``wait()``."""
        return self.wait()

    def done(self) -> bool:
        """True: asking waits."""
        self.wait()
        return True

    def then(self, callback: Callable[[Any], Any]) -> GraphFuture:
        """The future of ``callback(self)``, which runs when it is waited for."""
        return GraphFuture(self, callback)


def start(finish: Finish, launched: list[torch.Tensor], outputs: list[torch.Tensor]) -> dist.Work:
    """A Work for what has been launched; a ``WorkVariable`` when traced."""
    return GraphWork(finish, launched, outputs)


def end(
    finish: Finish,
    launched: list[torch.Tensor],
    outputs: list[torch.Tensor],
    async_op: bool,
) -> dist.Work | None:
    """Return the result of a c10d function: a Work in flight, or None after waiting."""
    if async_op:
        return start(finish, launched, outputs)
    finish(launched, outputs)
    return None


def wait(launched: torch.Tensor) -> torch.Tensor:
    """The value of a launch, once it is there."""
    return torch.ops._c10d_functional.wait_tensor(launched)


def only_wait(launched: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish a launch that gives nothing: a send, a barrier."""
    for each in launched:
        torch.ops.dynamo_dist.wait_tensor(each, next_serial())


def copy_back(launched: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish launches of one result for each buffer; shapes may differ, numbers of elements do not."""
    for each, output in zip(launched, outputs, strict=True):
        buffer, result = plain(output), wait(each)
        buffer.copy_(result if result.shape == buffer.shape else result.view(buffer.shape))


def split_back(launched: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish one launch whose flat result holds the buffers' elements one after the other."""
    flat = wait(launched[0]).view(-1)
    offset = 0
    for output in outputs:
        buffer = plain(output)
        buffer.copy_(flat[offset : offset + buffer.numel()].view(buffer.shape))
        offset = offset + buffer.numel()


def padded_back(launched: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish one launch whose flat result holds the buffers' elements in equal, padded rows."""
    flat = wait(launched[0]).view(len(outputs), -1)
    for rank, output in enumerate(outputs):
        buffer = plain(output)
        buffer.copy_(flat[rank, : buffer.numel()].view(buffer.shape))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as c10d sees it: without autograd, complex numbers as pairs of real ones."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def payload(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as it is sent: plain, its elements one after the other in memory."""
    # Whether it is contiguous already is not asked: in a hook on a gradient that cannot be traced.
    return plain(tensor).contiguous()
