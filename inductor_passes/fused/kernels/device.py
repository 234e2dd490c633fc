"""Give kernels shared device helpers: flags, waits, barriers, and reports of failed waits.

The protocol. Each rank owns one symmetric buffer: ``FLAG_BYTES`` of flags, then two halves of data.
A call of a kernel has an *epoch*, one more than the call before; it uses the half ``epoch % 2``. A
rank writes data into a peer's half (or its own, to be read). Then it sets a flag at the reader to
the epoch, and the reader waits until the flag has reached the epoch.

Nothing is ever reset and no barrier stands at the end. A rank writes a half again only two epochs
later. By then it has seen flags of the epoch between from every peer. A peer sends those only after
its kernel before, and all its reads, have ended.

Epochs live in device memory, one for each program, so that a CUDA graph can replay. Every launch on
a workspace has the same number of programs, so all programs count the same epochs. Comparisons are
by difference, because an epoch may wrap.

Modes: ``REAL`` on a device, with acquire and release at system scope; ``INTERPRETER`` the same
protocol with products in float32, because the interpreter multiplies the raw bits of bfloat16;
``CHECKING`` waits for nothing: a flag must have exactly its value already; ``TF32`` is ``REAL``,
but multiplies float32 numbers as TF32.

A wait looks at its flag a bounded number of times. The first to give up on a rank writes a report,
which ``workspace.py`` turns into an error. Later waits for that rank do not spin at all. Results
computed from data that never came are NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

REAL = tl.constexpr(0)
INTERPRETER = tl.constexpr(1)
CHECKING = tl.constexpr(2)
TF32 = tl.constexpr(3)

FLAG_BYTES = tl.constexpr(1 << 16)
# Words of a rank's own state.
FAILED = tl.constexpr(0)  # 1 once a wait has given up
SPIN_LIMIT = tl.constexpr(1)
REPORT = tl.constexpr(2)  # two words: the address of the report, which the host can read
RANK = tl.constexpr(4)
# Two words: tiles handed out in this call and in the one before, by parity of the epoch.
TILES = tl.constexpr(5)
EPOCHS = tl.constexpr(16)  # one a program
COUNTERS = tl.constexpr(16 + 512)  # for programs of one rank to meet at
STATE_WORDS = tl.constexpr(16 + 512 + 1024)
REPORT_WORDS = tl.constexpr(8)
MOST_RANKS = tl.constexpr(64)  # lanes of a look at all flags


@triton.jit
def flags_of(peers_ptr: tl.tensor, rank: tl.tensor) -> tl.tensor:
    """The flags of a rank, int32. ``peers_ptr`` holds the address of every rank's buffer."""
    return tl.load(peers_ptr + rank).to(tl.pointer_type(tl.int32))


@triton.jit
def data_of(
    peers_ptr: tl.tensor, rank: tl.tensor, offset: tl.tensor, DTYPE: tl.constexpr
) -> tl.tensor:
    """Return a pointer to the data of a rank, ``offset`` bytes after its flags.

    The address is a multiple of 16, and ``tl.multiple_of`` lets the compiler rely on that.
    """
    # Addresses are loaded, not passed: a kernel takes no list of pointers.
    base = tl.load(peers_ptr + rank) + FLAG_BYTES + offset
    return tl.multiple_of(base.to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def next_epoch(state_ptr: tl.tensor, program: tl.tensor) -> tl.tensor:
    """The epoch of this call, for one program. ``finish`` stores it."""
    # Only this program writes the word, so a plain load is enough. One counter for all would need
    # another barrier to say that everybody has read it.
    return tl.load(state_ptr + EPOCHS + program) + 1


@triton.jit
def finish(state_ptr: tl.tensor, program: tl.tensor, epoch: tl.tensor) -> None:
    """End a program's part of a call."""
    tl.debug_barrier()
    tl.store(state_ptr + EPOCHS + program, epoch)


@triton.jit
def open_counter(state_ptr: tl.tensor, program: tl.tensor, parity: tl.tensor) -> tl.tensor:
    """The counter of tiles of this call, and that of the next call set to 0: no program of it
    runs yet.
    """
    if program == 0:
        tl.store(state_ptr + TILES + (1 - parity), 0)
    return state_ptr + TILES + parity


@triton.jit
def take(counter_ptr: tl.tensor) -> tl.tensor:
    """Take the next tile: each is some program's, whichever is free."""
    # Relaxed: the number orders no memory, it only has to be unique.
    return tl.atomic_add(counter_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def load_flag(flag_ptr: tl.tensor) -> tl.tensor:
    """One look at a flag, acquiring what was written before it was set."""
    # An atomic and not a load: Triton's loads have no memory order, and a cache may serve one that
    # does not see the peer's write. System scope, because the writer is another device.
    return tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")


@triton.jit
def signal(flag_ptr: tl.tensor, epoch: tl.tensor) -> None:
    """Set a flag, releasing everything that the whole program has written.

    One thread sets the flag: without the barrier the others' writes could come after it.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flag_ptr, epoch, sem="release", scope="sys")


@triton.jit
def signal_add(flag_ptr: tl.tensor) -> None:
    """Count a flag up by one, releasing everything that the whole program has written."""
    tl.debug_barrier()
    tl.atomic_add(flag_ptr, 1, sem="release", scope="sys")


@triton.jit
def fail(
    state_ptr: tl.tensor, source: tl.tensor, index: tl.tensor, expect: tl.tensor, seen: tl.tensor
) -> None:
    """Report a wait that gave up; only the first of a rank is kept."""
    # Only the first failure is worth reporting: those after it wait for data that the first one
    # missed.
    if tl.atomic_cas(state_ptr + FAILED, 0, 1) == 0:
        word = tl.arange(0, REPORT_WORDS)
        value = tl.where(word == 1, source, tl.where(word == 2, index, 1))
        value = tl.where(word == 3, expect, tl.where(word == 4, seen, value))
        # Pinned host memory: the host reads the report without a copy, even while the stream is
        # busy.
        address = tl.load((state_ptr + REPORT).to(tl.pointer_type(tl.int64)))
        tl.store(address.to(tl.pointer_type(tl.int32)) + word, value)


@triton.jit
def flag_wait(
    flag_ptr: tl.tensor,
    expect: tl.tensor,
    ahead: tl.tensor,
    source: tl.tensor,
    index: tl.tensor,
    state_ptr: tl.tensor,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Wait until a flag has reached ``expect``; whether it did.

    A peer may already be in its next call, so the flag may be up to ``ahead`` further; more means
    that somebody signalled twice. ``source`` (a rank) and ``index`` say whose flag it is, for the
    report.
    """
    seen = load_flag(flag_ptr)
    if MODE != CHECKING:
        left = tl.full((), 0, tl.int32)
        # By difference, never by size: the 32 bits of an epoch wrap after some four billion calls.
        if seen - expect < 0:
            # One thread looks for all, as at the flag: threads that saw different words would part
            # at a barrier.
            if tl.atomic_add(state_ptr + FAILED, 0, sem="relaxed", scope="gpu") == 0:
                left = tl.load(state_ptr + SPIN_LIMIT)
        while (seen - expect < 0) & (left > 0):
            seen = load_flag(flag_ptr)
            left -= 1
        ok = (seen - expect >= 0) & (seen - expect <= ahead)
    else:
        # The checking mode runs programs one after the other: a flag that is not there yet is a
        # fault of the protocol and not of timing.
        ok = seen - expect == 0
    if ok == 0:
        fail(state_ptr, source, index, expect, seen)
    tl.debug_barrier()
    return ok


@triton.jit
def load_flags(flags_ptr: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """One look at several flags at once, acquiring what was written before each was set."""
    return tl.atomic_add(flags_ptr, 0, mask=mask, sem="acquire", scope="sys")


@triton.jit
def signal_all(flags_ptr: tl.tensor, epoch: tl.tensor, mask: tl.tensor) -> None:
    """Set several flags at once, releasing everything that the whole program has written: one
    fence for all.
    """
    tl.debug_barrier()
    tl.atomic_xchg(flags_ptr, epoch, mask=mask, sem="release", scope="sys")


@triton.jit
def wait_for_all(
    flags_ptr: tl.tensor,
    there: tl.tensor,
    expect: tl.tensor,
    ahead: tl.tensor,
    index: tl.tensor,
    state_ptr: tl.tensor,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Wait for a flag of every rank that is ``there``, as ``flag_wait`` does for one; whether
    all came.
    """
    seen = load_flags(flags_ptr, there)
    if MODE != CHECKING:
        least = tl.min(tl.where(there, seen - expect, 0), axis=0)
        left = tl.full((), 0, tl.int32)
        if least < 0:
            if tl.atomic_add(state_ptr + FAILED, 0, sem="relaxed", scope="gpu") == 0:
                left = tl.load(state_ptr + SPIN_LIMIT)
        while (least < 0) & (left > 0):
            seen = load_flags(flags_ptr, there)
            least = tl.min(tl.where(there, seen - expect, 0), axis=0)
            left -= 1
        wrong = there & ((seen - expect < 0) | (seen - expect > ahead))
    else:
        wrong = there & (seen - expect != 0)
    source = tl.max(tl.where(wrong, tl.arange(0, MOST_RANKS), -1), axis=0)
    if source >= 0:
        mine = tl.arange(0, MOST_RANKS) == source
        fail(state_ptr, source, index, expect, tl.sum(tl.where(mine, seen, 0), axis=0))
    tl.debug_barrier()
    return source < 0


@triton.jit
def pad_barrier(
    peers_ptr: tl.tensor,
    slot: tl.tensor,
    epoch: tl.tensor,
    rank: tl.tensor,
    state_ptr: tl.tensor,
    WORLD: tl.constexpr,
    MODE: tl.constexpr,
) -> tl.tensor:
    """Tell every rank that this program has come to ``slot``, wait for theirs; whether all came.

    What the same program of any rank wrote before is visible after. A slot is used once in a call.
    """
    lane = tl.arange(0, MOST_RANKS)
    # Own data needs no flag: this program wrote it.
    others = (lane < WORLD) & (lane != rank)
    theirs = tl.load(peers_ptr + lane, mask=others, other=0).to(tl.pointer_type(tl.int32))
    signal_all(theirs + slot * WORLD + rank, epoch, others)
    mine = flags_of(peers_ptr, rank) + slot * WORLD + lane
    return wait_for_all(mine, others, epoch, 1, slot, state_ptr, MODE)


@triton.jit
def sum_over_ranks(
    peers_ptr: tl.tensor,
    offset: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    WORLD: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Elements ``at`` of every rank's data, added in float32 in the order of ranks: the same
    bits anywhere.
    """
    # From rank 0 on, not from the own rank on: floats added in another order would give each rank
    # other bits, and replicas would drift apart.
    total = tl.load(data_of(peers_ptr, 0, offset, DTYPE) + at, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(1, WORLD):
        part = tl.load(data_of(peers_ptr, peer, offset, DTYPE) + at, mask=mask, other=0.0)
        total += part.to(tl.float32)
    return total


@triton.jit
def mma(a: tl.tensor, b: tl.tensor, acc: tl.tensor, MODE: tl.constexpr) -> tl.tensor:
    """``acc + a @ b`` in float32; float32 numbers with all their bits, unless in TF32."""
    # Triton's default for float32 is TF32, and torch's is not: the fused kernel must not round more
    # than what it replaces.
    PRECISION: tl.constexpr = "tf32" if MODE == TF32 else "ieee"
    if (MODE == INTERPRETER) | (MODE == CHECKING):
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)
