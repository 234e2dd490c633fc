"""Memory that kernels of one family share between the ranks of one group, and errors of their
waits.

A workspace is one symmetric buffer a rank (see ``device.py`` for its layout), the addresses of all
of them, and this process's own state: epochs, and the report of a wait that gave up.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence

import torch

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import device
from inductor_passes.fused.kernels.availability import MAX_WORLD, SECONDS_VARIABLE, why_not
from inductor_passes.torch_compat import c10d
from inductor_passes.torch_compat.c10d import group_size_of

FLAG_WORDS = int(device.FLAG_BYTES.value) // 4
STATE_WORDS = int(device.STATE_WORDS.value)
REPORT_WORDS = int(device.REPORT_WORDS.value)
# Looks at a flag in a second, on one H100.
LOOKS_PER_SECOND = 4_600_000
# How long a wait lasts before it gives up, about: looks are counted, in a word. A rank may be late
# because it writes a checkpoint. Another number of seconds: ``SECONDS_VARIABLE``, alike on all
# ranks.
WAIT_SECONDS = 450.0
ALIGNMENT = 16
# Programs of one launch. All of them must be resident at once beside a communication library's
# kernels: 128 programs of 512 threads fit on 64 multiprocessors of an H100.
PROGRAMS = 128
# A call that needs more is left to the communication library, which moves large messages as fast.
MAX_CALL_BYTES = 1 << 30
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Workspace:
    """Symmetric memory of one kernel family on one group.

    ``buffers`` are uint8, one a rank, equal in size, mapped here. This process computes ranks
    ``rank`` to ``rank + local_ranks - 1``: one of them, except where ranks are virtual. All ranks
    use it in the same order, as with a communicator; calls on several streams come one after the
    other.

    ``memory``, ``own_bytes(world)`` of uint8, holds what this process keeps on the device; without
    it, torch's allocator gives it. While Inductor warms up for a CUDA graph, that would be memory
    of the graph.
    """

    def __init__(
        self,
        family: str,
        buffers: Sequence[torch.Tensor],
        rank: int,
        *,
        local_ranks: int = 1,
        programs: int = PROGRAMS,
        flags: int = 2 * PROGRAMS,
        spin_limit: int | None = None,
        mode: int = device.REAL.value,
        memory: torch.Tensor | None = None,
        mapping: object = None,
        group: object = None,
    ) -> None:
        if not 2 <= len(buffers) <= MAX_WORLD or flags * len(buffers) > FLAG_WORDS:
            raise KernelError(
                f"{family} cannot run on {len(buffers)} ranks with {flags} flags for each.",
                f"A buffer has room for 2 to {MAX_WORLD} ranks and {FLAG_WORDS} flags.",
                f"Leave the fusion out with options={{'disable': ['fuse_{family}']}}.",
            )
        self.family = family
        self.buffers = tuple(buffers)
        self._mapping = mapping  # peers' memory stays mapped as long as this lives
        # Weak: the cache of workspaces must not keep a destroyed process group, and its
        # communicator, alive.
        self._group = None if group is None else weakref.ref(group)
        self._stream: torch.cuda.Stream | None = None
        self.rank = rank
        self.world = len(buffers)
        self.local_ranks = local_ranks
        self.programs = programs
        self.mode = mode
        place = buffers[0].device
        addresses = torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)
        on_host = torch.zeros(local_ranks, REPORT_WORDS, dtype=torch.int32)
        # Pinned memory is written by the kernel and read here without a copy or a wait.
        self.reports = on_host.pin_memory() if place.type == "cuda" else on_host
        state = torch.zeros(local_ranks, STATE_WORDS, dtype=torch.int32)
        looks = spin_limit_told() if spin_limit is None else spin_limit
        for i in range(local_ranks):
            state[i, device.SPIN_LIMIT.value] = looks
            state[i, device.RANK.value] = rank + i
            # Two int32 words hold one 64-bit address; the state is int32 because flags and epochs
            # are.
            words = state[i, device.REPORT.value : device.REPORT.value + 2]
            words.view(torch.int64)[0] = self.reports[i].data_ptr()
        if memory is None:
            self.peers, self.state = addresses.to(place), state.to(place)
        else:
            # In symmetric memory, which torch's allocator does not own: under a CUDA graph's
            # warm-up its own memory would be part of the graph's pool.
            kept = memory.split([addresses.nbytes, memory.numel() - addresses.nbytes])
            self.peers = kept[0].view(torch.int64).copy_(addresses)
            self.state = kept[1].view(torch.int32).view(state.shape).copy_(state)

    @property
    def half_bytes(self) -> int:
        """Bytes of data that one call may use, at every rank."""
        data = self.buffers[0].numel() - FLAG_WORDS * 4
        # Rounded so that also the half of a half, which two-shot uses, is aligned for wide loads.
        return data // 2 // (2 * ALIGNMENT) * (2 * ALIGNMENT)

    def gathered(self, dtype: torch.dtype) -> tuple[torch.Tensor, int, int]:
        """What this process's ranks have been sent, from the first one's first half on; strides of
        ranks and halves.

        In elements. Buffers of virtual ranks lie at equal distances.
        """
        first = self.buffers[self.rank]
        apart = 0
        if self.local_ranks > 1:
            apart = self.buffers[self.rank + 1].data_ptr() - first.data_ptr()
        size = dtype.itemsize
        half = self.half_bytes // size
        return first[FLAG_WORDS * 4 :].view(dtype), (apart // size) or 2 * half, half

    def serves(self, group: object) -> bool:
        """Return whether it was made for this process group, and not for one that bore the name
        before.
        """
        return self._group is None or self._group() is group

    def after_earlier_calls(self) -> None:
        """Make the current stream wait for the stream of the call before: calls side by side would
        share epochs.

        A replayed CUDA graph is not known here: replay graphs of one group on one stream.
        """
        if self.state.device.type != "cuda":
            return
        stream, before = torch.cuda.current_stream(self.state.device), self._stream
        self._stream = stream
        # On one stream calls are in order anyway.
        if before is None or before == stream:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(before):
            joins = torch.cuda.is_current_stream_capturing() == capturing
        if joins:  # a capture begins behind all that ran before it
            stream.wait_stream(before)

    def raise_if_failed(self) -> None:
        """Raise KernelError for a wait that gave up, in a kernel that has ended. Does not wait
        for any.
        """
        for i, report in enumerate(self.reports.tolist()):
            failed, source, index, expected, seen = report[:5]
            if failed:
                raise wait_error(self.family, self.rank + i, source, index, expected, seen)


def spin_limit_told() -> int:
    """Looks at a flag before a wait gives up. Raises KernelError for a number of seconds that is
    none.
    """
    told = os.environ.get(SECONDS_VARIABLE, "") or str(WAIT_SECONDS)
    try:
        looks = float(told) * LOOKS_PER_SECOND
    except ValueError:
        looks = float("nan")
    if not 1 <= looks < 1 << 31:
        raise KernelError(
            f"{SECONDS_VARIABLE} is {told!r}.",
            f"It is how long a kernel waits for a peer: up to {(1 << 31) // LOOKS_PER_SECOND} "
            "seconds.",
            f"Unset it for {WAIT_SECONDS:.0f} seconds.",
        )
    return int(looks)


def wait_error(
    family: str, rank: int, source: int, index: int, expected: int, seen: int
) -> KernelError:
    """The error of one wait that gave up."""
    # The difference as the device computes it: in 32 bits, with its sign.
    late = (seen - expected) % (1 << 32) >= 1 << 31
    why = (
        f"Rank {source} did not signal in time: it died, hangs, or runs another program."
        if late
        else f"Rank {source} signalled more often than it should: its buffer is of another epoch."
    )
    return KernelError(
        f"{family} on rank {rank} gave up on chunk {index} of rank {source}: expected flag "
        f"{expected}, saw {seen}.",
        why,
        "Look for the first error of that rank. Results computed since are NaN; destroy the "
        "process "
        "group and start again, or compile with options={'disable': "
        f"['fuse_{family}']}}.",
    )


def own_bytes(world: int) -> int:
    """Size of what a process that computes one rank keeps on the device: addresses and state."""
    return 8 * world + 4 * STATE_WORDS


def bytes_needed(data_bytes: int) -> int:
    """Size of each rank's buffer for calls that use up to ``data_bytes`` each."""
    unit = 2 * ALIGNMENT
    return FLAG_WORDS * 4 + 2 * (-(-data_bytes // unit) * unit)


def virtual_workspace(
    family: str,
    world: int,
    data_bytes: int,
    place: torch.device | str,
    *,
    programs: int = PROGRAMS,
    spin_limit: int | None = None,
    mode: int = device.REAL.value,
) -> Workspace:
    """All ranks in this process, on one device: axis 1 of the grid. Data starts as NaN, to be
    noticed.

    Launches are cooperative, so that one whose programs do not all fit on the device fails and does
    not hang: ``programs * world`` must fit.
    """
    shape = (world, bytes_needed(data_bytes))
    memory = torch.full(shape, 255, dtype=torch.uint8, device=place)
    # Flags start at 0 and epochs at 1: nothing counts as sent.
    memory[:, : FLAG_WORDS * 4] = 0
    return Workspace(
        family, [*memory], 0, local_ranks=world, programs=programs, spin_limit=spin_limit, mode=mode
    )


_workspaces: dict[tuple[str, str], Workspace] = {}
# Those that a larger one has replaced: a CUDA graph may have recorded their addresses.
_replaced: list[tuple[str, Workspace]] = []


def install_workspace(group_name: str, workspace: Workspace) -> None:
    """Use ``workspace`` for its family on a group, from now on. Every rank does, or none."""
    _workspaces[group_name, workspace.family] = workspace


def find_workspace(
    family: str,
    tensor: torch.Tensor,
    group_name: str,
    data_bytes: int,
    *,
    programs: int = PROGRAMS,
    flags: int = 2 * PROGRAMS,
) -> Workspace | None:
    """Return the group's workspace of ``data_bytes`` a call; None where the kernel cannot run.

    It is allocated on first use, and again when a call needs more bytes; ranks meet then. All ranks
    make the same calls, so all of them allocate or none does. Raises KernelError if a wait gave up
    in an earlier call, or if a CUDA graph capture would have to allocate.
    """
    # All of it is the same on every rank of a group: no rank allocates, or all meet to do so.
    if tensor.dtype not in DTYPES or tensor.numel() == 0 or data_bytes > MAX_CALL_BYTES:
        return None
    found = _workspaces.get((group_name, family))
    group = c10d.process_group(group_name)
    if found is not None and not found.serves(group):
        # Group names are used again after a group was destroyed. The old mapping is of processes
        # that may be gone.
        release(group_name)
        found = None
    if found is not None:
        # Here and not only at the end: a job that goes on with NaN would train for hours on them.
        found.raise_if_failed()
        if found.half_bytes >= data_bytes:
            found.after_earlier_calls()
            return found
    place = tensor.device
    if why_not(group_name, place.type):
        return None
    if torch.cuda.is_current_stream_capturing():
        raise KernelError(
            f"{family} needs {data_bytes} bytes of symmetric memory inside a CUDA graph capture.",
            "Ranks meet to allocate it, which a graph cannot record.",
            "Run the function once before capturing it.",
        )
    # A power of two: calls that grow step by step keep at most twice the memory of the largest.
    size = bytes_needed(1 << (data_bytes - 1).bit_length())
    given, rank, mapping = c10d.symmetric_buffers(
        size + own_bytes(group_size_of(group_name)), group_name, place
    )
    made = Workspace(
        family,
        [buffer[:size] for buffer in given],
        rank,
        programs=programs,
        flags=flags,
        memory=given[rank][size:],
        mapping=mapping,
        group=group,
    )
    if found is not None:
        _replaced.append((group_name, found))
    made.after_earlier_calls()
    _workspaces[group_name, family] = made
    return made


def raise_if_failed(*, wait: bool = True) -> None:
    """Wait for the device, or not, then raise KernelError if a wait of any kernel has given up
    since the start.
    """
    if wait and torch.cuda.is_available():
        torch.cuda.synchronize()
    for workspace in (*_workspaces.values(), *(old for _, old in _replaced)):
        workspace.raise_if_failed()


def release(group_name: str | None = None) -> None:
    """Forget the workspaces of a group, or all: for after its process group was destroyed."""
    for key in [key for key in _workspaces if group_name in (None, key[0])]:
        del _workspaces[key]
    _replaced[:] = [entry for entry in _replaced if group_name not in (None, entry[0])]
