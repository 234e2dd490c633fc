"""The protocol under random arrival orders, and planted faults that must be noticed.

By hand: TRITON_INTERPRET=1 pytest test/inductor_passes/fused/kernels/check_protocol.py
"""

import functools

import pytest
import torch
import triton
import triton.language as tl
from interpreted import Schedule, workspace
from triton.runtime import interpreter

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import all_gather_matmul as gather
from inductor_passes.fused.kernels import all_reduce_add_norm as norm
from inductor_passes.fused.kernels import device as dev
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels.all_reduce_add_norm import Norm
from inductor_passes.fused.kernels.tiles import Tiles

TILES = Tiles(16, 16, 16, warps=4, stages=1)
WORLD = 3


def totals(space, seed=0, plant=None, two_shot=False, rows=5):
    """Sums over ranks, of which there is nothing but the norm to make."""
    x = torch.randn(WORLD, rows, 20)
    with Schedule(seed, plant):
        _, total, *_ = norm.launch_all_reduce_add_norm(
            x.view(-1, 20), Norm(), space, two_shot=two_shot
        )
    return total.view(x.shape), x.sum(0).expand(x.shape)


def gather_matmul(space, seed=0, plant=None, rows=40, descriptors=False):
    a, weight = torch.randn(WORLD * rows, 16), torch.randn(16, 16)
    with Schedule(seed, plant):
        (out,) = gather.launch_all_gather_matmul(
            a,
            [weight],
            [],
            space,
            tiles=TILES,
            copiers=2,
            copy_block=64,
            descriptors=descriptors,
        )
    return out, (a @ weight).repeat(WORLD, 1)


def matmul_scatter(space, seed=0, plant=None, rows=20, descriptors=False):
    a, b = torch.randn(WORLD * WORLD * rows, 16), torch.randn(WORLD * 16, 16)
    with Schedule(seed, plant):
        out = scatter.launch_matmul_reduce_scatter(
            a, b, space, average=False, tiles=TILES, block=64, descriptors=descriptors
        )
    return out, torch.bmm(a.view(WORLD, -1, 16), b.view(WORLD, 16, 16)).sum(0)


def reduce_norm(space, seed=0, plant=None, rows=5):
    x, residual = torch.randn(WORLD * rows, 20), torch.randn(rows, 20)
    terms = Norm(residual.repeat(WORLD, 1))
    with Schedule(seed, plant):
        y, *_ = norm.launch_all_reduce_add_norm(x, terms, space, two_shot=seed % 2 == 1)
    total = x.view(WORLD, rows, 20).sum(0) + residual
    return y, torch.nn.functional.rms_norm(total, (20,), eps=1e-5).repeat(WORLD, 1)


CALLS = {
    "all_reduce_add_norm": reduce_norm,
    "all_gather_matmul": gather_matmul,
    "matmul_reduce_scatter": matmul_scatter,
    "all_gather_matmul by descriptors": functools.partial(gather_matmul, descriptors=True),
    "matmul_reduce_scatter by descriptors": functools.partial(matmul_scatter, descriptors=True),
}


SIGNALS = {
    "all_reduce_add_norm": "signal_all",
    "all_gather_matmul": "signal",
    "matmul_reduce_scatter": "signal_add",
}


def space_of(call, **more):
    return workspace(call.split()[0], WORLD, programs=3, **more)


def is_right(result):
    got, wanted = result
    return torch.allclose(got, wanted, atol=1e-4)


def times(count, fn):
    """The n-th call of a device helper does ``fn`` in its stead."""
    seen = []

    def planted(name):
        original = getattr(dev, name)

        def helper(*args):
            seen.append(name)
            return fn(original, *args) if len(seen) == count else original(*args)

        return helper

    return planted


@pytest.mark.parametrize("call", CALLS)
def test_any_order_any_number_of_calls(call):
    space = space_of(call)
    for seed in range(4):
        assert is_right(CALLS[call](space, seed)), seed
        space.raise_if_failed()


def test_two_shot_and_changing_sizes():
    space = workspace("all_reduce_add_norm", WORLD)
    for seed, rows in enumerate((5, 2, 15, 1)):
        assert is_right(totals(space, seed, two_shot=seed % 2 == 0, rows=rows)), rows
    space = workspace("all_gather_matmul", WORLD, programs=3)
    for seed, rows in enumerate((40, 5, 33)):
        assert is_right(gather_matmul(space, seed, rows=rows)), rows


@pytest.mark.parametrize("family", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_calls_by_threads_and_by_descriptors_share_a_workspace(family):
    space = space_of(family)
    for seed, how in enumerate(
        ("", " by descriptors", "", "", " by descriptors", "", " by descriptors")
    ):
        assert is_right(CALLS[family + how](space, seed)), seed
        space.raise_if_failed()


@pytest.mark.parametrize("call", [c for c in CALLS if "scatter" not in c])
def test_epochs_wrap_around(call):
    space = space_of(call)
    last = 2**31 - 2
    space.state[:, dev.EPOCHS.value : dev.COUNTERS.value] = last
    for buffer in space.buffers:
        buffer.view(torch.int32)[: 1 << 14] = last
    for seed in range(4):
        assert is_right(CALLS[call](space, seed))
        space.raise_if_failed()
    assert (space.state[:, dev.EPOCHS.value] < 0).all()


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_signal_is_named_and_ends(call):
    torch.manual_seed(0)
    name = SIGNALS[call.split()[0]]
    space = space_of(call, spin_limit=50)
    dropped = times(2, lambda original, *args: None)
    got, _ = CALLS[call](space, plant={name: dropped(name)})
    assert torch.isnan(got).any()
    with pytest.raises(
        KernelError,
        match=rf"{space.family} on rank \d gave up on chunk \d of rank \d: expected flag \d, saw \d",
    ):
        space.raise_if_failed()


def number(value):
    return int(value.handle.data[0])


def ends_of(flag_ptr, space):
    """The rank that sets a flag, and the rank that waits for it."""
    return ends_at(number(flag_ptr), space)


def but(flags_ptr, mask, space, left_out):
    """``mask`` without the flags whose ends are ``left_out``."""
    kept = mask.handle.data.copy()
    for lane in kept.nonzero()[0]:
        if left_out(ends_at(int(flags_ptr.handle.data[lane]), space)):
            kept[lane] = False
    return tl.tensor(interpreter.TensorHandle(kept, mask.handle.dtype), mask.type)


def ends_at(address, space):
    flags = [buffer.data_ptr() for buffer in space.buffers]
    peer = next(r for r in range(WORLD) if 0 <= address - flags[r] < dev.FLAG_BYTES.value)
    index = (address - flags[peer]) // 4
    if space.family == "all_gather_matmul":
        return index // gather.MAX_CHUNKS.value, peer
    return index % WORLD, peer


@pytest.mark.parametrize("call", CALLS)
def test_every_rank_waits_for_every_other(call):
    name = SIGNALS[call.split()[0]]
    original = getattr(dev, name)
    for ends in ((0, 1), (0, 2)):  # the next rank and the one before: kernels count from their own
        space = space_of(call, spin_limit=20)

        def deaf(flag_ptr, *epoch, space=space, ends=ends):
            if ends_of(flag_ptr, space) != ends:
                original(flag_ptr, *epoch)

        def deaf_to_one(flags_ptr, epoch, mask, space=space, ends=ends):
            original(flags_ptr, epoch, but(flags_ptr, mask, space, lambda found: found == ends))

        CALLS[call](space, plant={name: deaf_to_one if name == "signal_all" else deaf})
        source, peer = ends
        assert [report[0] for report in space.reports.tolist()] == [r == peer for r in range(WORLD)]
        assert space.reports[peer, 1] == source


def test_a_rank_that_never_signals():
    space = workspace("all_reduce_add_norm", WORLD, spin_limit=30)
    original = dev.signal_all

    def dead(flags_ptr, epoch, mask):  # rank 2 sends nothing
        original(flags_ptr, epoch, but(flags_ptr, mask, space, lambda found: found[0] == 2))

    got, wanted = totals(space, plant={"signal_all": dead})
    assert torch.isnan(got[0]).all() and torch.isnan(got[1]).all()
    assert torch.allclose(got[2], wanted[2], atol=1e-5)  # it heard the others
    reports = space.reports.tolist()
    assert [r[0] for r in reports] == [1, 1, 0]
    assert [r[1] for r in reports[:2]] == [2, 2]
    with Schedule() as later:  # a rank that has failed does not spin again
        norm.launch_all_reduce_add_norm(torch.randn(WORLD, 20), Norm(), space, two_shot=False)
    assert later.switches < 2 * WORLD * 2 * (WORLD - 1) * 2


def test_a_signal_from_another_epoch():
    space = workspace("all_reduce_add_norm", WORLD)
    ahead = times(3, lambda original, flags, epoch, mask: original(flags, epoch + 5, mask))
    totals(space, plant={"signal_all": ahead("signal_all")})
    with pytest.raises(KernelError, match="signalled more often than it should"):
        space.raise_if_failed()


def test_a_double_signal_is_noticed():
    # In the checking mode a count must be exact; virtual ranks push one after another, then reduce.
    space = workspace("matmul_reduce_scatter", WORLD, mode=2)
    assert is_right(matmul_scatter(space))
    space.raise_if_failed()

    def twice(original, flag_ptr):
        original(flag_ptr)
        original(flag_ptr)

    double = times(4, twice)
    matmul_scatter(space, plant={"signal_add": double("signal_add")})
    with pytest.raises(KernelError, match="expected flag 4, saw 5"):
        space.raise_if_failed()


@pytest.mark.parametrize("call", [c for c in CALLS if "scatter" not in c])
def test_an_epoch_that_does_not_advance_is_noticed(call):
    space = space_of(call, spin_limit=50)
    for seed in (0, 2):
        assert is_right(CALLS[call](space, seed))
    space.state[1, dev.EPOCHS.value : dev.COUNTERS.value] = 0  # rank 1 believes in an older call
    assert not is_right(CALLS[call](space))
    assert is_reported(space)


def test_a_count_that_does_not_advance_is_noticed():
    # Flags of this family count tiles; CHECKING compares them exactly.
    space = workspace("matmul_reduce_scatter", WORLD, mode=2)
    assert is_right(matmul_scatter(space))
    space.state[1, dev.COUNTERS.value :] = 0
    matmul_scatter(space)
    assert space.reports[:, 0].tolist() == [0, 1, 0]


def is_reported(space):
    return bool(space.reports[:, 0].any())


def test_tiles_are_multiplied_in_the_order_in_which_rows_come(monkeypatch):
    waits, served = {}, {}
    wait = dev.flag_wait
    space = workspace("all_gather_matmul", WORLD, programs=3)  # two push, one multiplies

    def noted_wait(flag, expect, ahead, source, index, state, mode):
        rank = (number(state) - space.state.data_ptr()) // 4 // dev.STATE_WORDS.value
        waits.setdefault(rank, []).append((number(source), number(index)))
        return wait(flag, expect, ahead, source, index, state, mode)

    signal = dev.signal

    def noted_signal(flag, epoch):
        rank, peer = ends_of(flag, space)
        served.setdefault(rank, []).append(peer)
        signal(flag, epoch)

    monkeypatch.setattr(dev, "flag_wait", noted_wait)
    assert is_right(gather_matmul(space, plant={"signal": noted_signal}))
    for rank in range(WORLD):
        after, last = (
            (rank + 1) % WORLD,
            (rank + 2) % WORLD,
        )  # its own rows, which came first, need no flag
        assert waits[rank] == [(after, c) for c in range(3)] + [(last, c) for c in range(3)]
        assert served[rank] == [last] * 3 + [after] * 3  # whom this rank's rows are next for


@triton.jit
def push_rows_flag_first(
    a_ptr, peers_ptr, state_ptr, rank, half, epoch, program, n, chunk_size, chunks,
    WORLD: tl.constexpr, COPIERS: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Planted: the flag is set before the rows are there."""
    for step in range(1, WORLD):
        peer = (rank + WORLD - step) % WORLD
        target = dev.data_of(peers_ptr, peer, half, DTYPE) + tl.cast(rank, tl.int64) * n
        for chunk in range(chunks):
            dev.signal(dev.flags_of(peers_ptr, peer) + rank * gather.MAX_CHUNKS + chunk, epoch)
            first = tl.cast(chunk, tl.int64) * chunk_size
            last = tl.minimum(first + chunk_size, n)
            for start in range(first + program * BLOCK, last, COPIERS * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(target + at, tl.load(a_ptr + at, mask=at < last), mask=at < last)


def test_a_flag_before_its_data_is_noticed(monkeypatch):
    monkeypatch.setattr(gather, "push_rows", push_rows_flag_first)
    wrong = 0
    for seed in range(4):  # a fresh workspace is poisoned: what is read too soon is NaN
        got, _ = gather_matmul(workspace("all_gather_matmul", WORLD, programs=3), seed)
        wrong += bool(torch.isnan(got).any())
    assert wrong == 4


def test_a_program_that_forgets_its_barrier_slot_is_noticed(monkeypatch):
    # Both barriers of two-shot on one slot: the second passes on the first one's flags.
    original = dev.pad_barrier

    def one_slot(peers_ptr, slot, *rest):
        return original(peers_ptr, slot % 2, *rest)

    monkeypatch.setattr(dev, "pad_barrier", one_slot)
    wrong = 0
    for seed in range(6):
        space = workspace("all_reduce_add_norm", WORLD)
        got, wanted = totals(space, seed, two_shot=True, rows=15)
        wrong += not torch.allclose(got, wanted)
    assert wrong
