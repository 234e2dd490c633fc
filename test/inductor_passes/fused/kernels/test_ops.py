"""The operators as torch sees them: shapes, fallbacks to torch's own operations, refusals."""

import threading
import types

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton (pip install dynamo-dist[triton])")

from inductor_passes.errors import KernelError
from inductor_passes.fused.kernels import all_gather_matmul as gather
from inductor_passes.fused.kernels import all_reduce_add_norm as norm
from inductor_passes.fused.kernels import matmul_reduce_scatter as scatter
from inductor_passes.fused.kernels import workspace as spaces
from inductor_passes.testing import fake_group
from inductor_passes.torch_compat import c10d

ops = torch.ops.inductor_passes
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(autouse=True)
def group():
    with fake_group(4):
        yield


def t(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(dtype)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (
            norm.all_reduce_add_rmsnorm,
            (t(2, 3, 8), t(2, 3, 8), None, t(8), 1e-5, torch.bfloat16, "0"),
        ),
        (
            norm.all_reduce_add_layernorm,
            (t(3, 8), None, t(8), t(8), t(8), 1e-5, torch.float8_e4m3fn, "0"),
        ),
        (gather.all_gather_matmul, (t(3, 8), [t(8, 5), t(8, 2)], [], "silu", True, "0", 4)),
        (scatter.matmul_reduce_scatter, (t(8, 6), t(5, 6).t(), "avg", "0", 4)),
    ],
)
def test_fake_kernels_agree_with_what_runs_on_cpu(op, arguments):
    assert set(torch.library.opcheck(op, arguments, test_utils=CHECKS).values()) == {"SUCCESS"}


def test_on_cpu_the_reference_runs():
    a, weight, bias = t(3, 8), t(8, 5), t(5)
    (out,) = ops.all_gather_matmul(a, [weight], [bias], "relu", False, "0", 4)
    (wanted,) = gather.reference(a, [weight], [bias], "relu", False, "0", 4)
    torch.testing.assert_close(out, wanted)
    y, total, rstd, scale = ops.all_reduce_add_rmsnorm(a, a, None, None, 1e-5, a.dtype, "0")
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(total, (8,), eps=1e-5))
    assert rstd.shape == (3, 1)
    assert scale.numel() == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.all_gather_matmul(t(3, 8), [t(7, 5)], [], "none", False, "0", 4),
            r"weights \[7, 5\]",
        ),
        (
            lambda: ops.all_gather_matmul(t(3, 8), [t(8, 5).half()], [], "none", False, "0", 4),
            "one dtype",
        ),
        (
            lambda: ops.all_gather_matmul(t(3, 8), [t(8, 5)] * 4, [], "none", False, "0", 4),
            "one to 3 weights",
        ),
        (
            lambda: ops.all_gather_matmul(t(3, 8), [t(8, 5)], [], "tanh", False, "0", 4),
            "activation 'tanh'",
        ),
        (
            lambda: ops.all_gather_matmul(t(3, 8), [t(8, 5)], [t(1)], "none", False, "0", 4),
            r"biases \[1\]",
        ),
        (
            lambda: ops.all_reduce_add_rmsnorm(
                t(3, 8), t(1, 8), None, None, 1e-5, torch.float32, "0"
            ),
            r"x \[3, 8\], residual \[1, 8\]",
        ),
        (
            lambda: ops.all_reduce_add_layernorm(
                t(3, 8), None, None, t(1), None, 1e-5, torch.float32, "0"
            ),
            r"weight \[1\]",
        ),
        (
            lambda: ops.matmul_reduce_scatter(t(9, 8), t(8, 5), "sum", "0", 4),
            "share evenly",
        ),
        (lambda: ops.matmul_reduce_scatter(t(8, 8), t(8, 5), "max", "0", 4), "sum or avg"),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(KernelError, match=message):
        call()


def test_inputs_that_are_not_contiguous():
    a = t(8, 6).t()
    out = ops.matmul_reduce_scatter(a[:4], t(8, 10)[:, ::2], "sum", "0", 4)
    assert out.shape == (1, 5)
    assert not gather.can_read([t(8, 10)[:, ::2]])
    assert not gather.can_read([t(8, 5), t(5, 8).t()])


def test_rows_that_are_not_contiguous_reach_kernels_contiguous(monkeypatch):
    seen = []

    def launched(*given, **_):
        for value in given:
            seen.extend(value if isinstance(value, (list, tuple)) else [value])
        raise StopIteration

    monkeypatch.setattr(gather, "launch_all_gather_matmul", launched)
    monkeypatch.setattr(norm, "launch_all_reduce_add_norm", launched)
    row, x = t(8, 2)[:, 1], t(8, 8).t()
    for family in (gather.FAMILY, norm.FAMILY):
        spaces.install_workspace("0", spaces.virtual_workspace(family, 4, 1 << 12, "cpu"))
    try:
        with pytest.raises(StopIteration):
            ops.all_gather_matmul(x, [t(8, 8)], [row], "none", False, "0", 4)
        with pytest.raises(StopIteration):
            ops.all_reduce_add_layernorm(x, x, row, row, row, 1e-5, torch.float32, "0")
    finally:
        spaces.release("0")
    tensors = [value for value in seen if isinstance(value, torch.Tensor)]
    assert len(tensors) == 3 + 5
    assert all(tensor.is_contiguous() for tensor in tensors)


def test_a_world_beyond_the_flags_is_refused():
    buffers = [torch.zeros(spaces.bytes_needed(64), dtype=torch.uint8) for _ in range(65)]
    with pytest.raises(KernelError, match="on 65 ranks with 256 flags"):
        spaces.Workspace("all_reduce", buffers, 0)
    with pytest.raises(KernelError, match="2 to 64 ranks"):
        spaces.Workspace("all_reduce", buffers[:1], 0)


def test_no_workspace_for_what_no_kernel_takes():
    def find(tensor, size=1 << 10):
        return spaces.find_workspace("all_reduce", tensor, "0", size)

    space = spaces.virtual_workspace("all_reduce", 4, 1 << 12, "cpu")
    spaces.install_workspace("0", space)
    try:
        assert find(t(4)) is space
        assert find(t(4).long()) is None
        assert find(t(4).double()) is None
        assert find(t(0)) is None
        assert find(t(4), 1 << 31) is None
        assert find(t(4), 1 << 13) is None  # more than it has, and a CPU cannot make another
        space.reports[1, :5] = torch.tensor([1, 3, 7, 5, 4])
        with pytest.raises(KernelError, match="all_reduce on rank 1 gave up on chunk 7 of rank 3"):
            find(t(4))
        with pytest.raises(KernelError, match="expected flag 5, saw 4"):
            spaces.raise_if_failed()
    finally:
        spaces.release("0")
    assert find(t(4)) is None


@pytest.fixture
def symmetric(monkeypatch):
    """Symmetric memory as far as a CPU has it; returns the sizes that were asked for."""
    sizes = []

    def buffers(size, group_name, place):
        sizes.append(size)
        return [torch.zeros(size, dtype=torch.uint8) for _ in range(4)], 0, None

    monkeypatch.setattr(spaces.c10d, "symmetric_buffers", buffers)
    monkeypatch.setattr(spaces, "why_not", lambda group, device: "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield sizes
    spaces.release()


def test_workspace_grows_and_keeps_recorded_memory(symmetric, monkeypatch):
    first = spaces.find_workspace("all_reduce", t(4), "0", 1000)
    assert spaces.find_workspace("all_reduce", t(4), "0", 1024) is first
    second = spaces.find_workspace("all_reduce", t(4), "0", 1025)
    assert second is not first
    assert second.half_bytes == 2 * first.half_bytes == 2048
    # Nothing on the device comes from torch's allocator, which may be lending a CUDA graph's
    # memory.
    for space in (first, second):
        kept = space.buffers[0].untyped_storage().data_ptr()
        assert {t.untyped_storage().data_ptr() for t in (space.peers, space.state)} == {kept}
        assert space.peers.tolist() == [buffer.data_ptr() for buffer in space.buffers]
        assert space.state[0, spaces.device.SPIN_LIMIT.value] == spaces.spin_limit_of_environment()
    first.reports[0, :5] = torch.tensor([1, 3, 7, 5, 4])  # a replay of the old graph gives up
    with pytest.raises(KernelError, match="gave up on chunk 7 of rank 3"):
        spaces.raise_if_failed()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(KernelError, match="Run the function once before capturing"):
        spaces.find_workspace("all_reduce", t(4), "0", 4096)
    assert len(symmetric) == 2


def test_new_group_of_the_same_name_gets_its_workspace(symmetric):
    import torch.distributed as dist

    old = dist.group.WORLD  # somebody keeps it
    first = spaces.find_workspace("all_reduce", t(4), "0", 1000)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=4)
    assert dist.group.WORLD is not old
    assert spaces.find_workspace("all_reduce", t(4), "0", 1000) is not first


def test_how_long_a_wait_lasts_can_be_told(monkeypatch):
    monkeypatch.setenv(spaces.SECONDS_VARIABLE, "10")
    space = spaces.virtual_workspace("all_reduce", 2, 64, "cpu")
    assert space.state[0, spaces.device.SPIN_LIMIT.value] == 10 * spaces.LOOKS_PER_SECOND
    for wrong in ("soon", "0", "nan", "100000"):
        monkeypatch.setenv(spaces.SECONDS_VARIABLE, wrong)
        with pytest.raises(KernelError, match=f"WAIT_SECONDS is '{wrong}'"):
            spaces.virtual_workspace("all_reduce", 2, 64, "cpu")


class Stream:
    """A CUDA stream, as far as order is concerned."""

    current = None

    def __init__(self, capturing=False):
        self.capturing, self.waited_for = capturing, []

    def __enter__(self):
        self.before, Stream.current = Stream.current, self

    def __exit__(self, *_):
        Stream.current = self.before

    def wait_stream(self, other):
        self.waited_for.append(other)


def test_calls_on_several_streams_come_one_after_the_other(monkeypatch):
    space = spaces.virtual_workspace("all_reduce", 2, 64, "cpu")
    monkeypatch.setattr(space, "state", types.SimpleNamespace(device=torch.device("cuda")))
    for name, stand_in in {
        "current_stream": lambda device: Stream.current,
        "stream": lambda stream: stream,
        "is_current_stream_capturing": lambda: Stream.current.capturing,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    first, second, graph = Stream(), Stream(), Stream(capturing=True)
    for stream in (first, first, second, graph, graph, first):
        with stream:
            space.after_earlier_calls()
    assert second.waited_for == [first]
    # Neither a capture nor what comes after it can wait for the other.
    assert graph.waited_for == first.waited_for == []


def test_symmetric_memory_is_made_outside_graph_capture(monkeypatch):
    def allocate(nbytes, group_name, place):
        return [threading.current_thread()], nbytes, group_name

    monkeypatch.setattr(c10d, "_allocate", allocate)
    (thread,), nbytes, name = c10d.symmetric_buffers(64, "0", torch.device("cpu"))
    assert thread is not threading.current_thread()
    assert (nbytes, name) == (64, "0")


class Mapped:
    """Symmetric memory of two ranks in one segment, of which a tensor begins at 64 bytes."""

    world_size, rank = 2, 1

    def __init__(self):
        self.segments = [torch.zeros(256, dtype=torch.uint8) for _ in range(2)]
        self.buffer_ptrs = [segment.data_ptr() for segment in self.segments]

    def get_buffer(self, rank, sizes, dtype, storage_offset=0):
        return self.segments[rank][storage_offset:][: sizes[0]]


class MappedByTensor(Mapped):
    def get_remote_tensor(self, rank, sizes, dtype):
        return self.segments[rank][64:][: sizes[0]]


@pytest.mark.parametrize("kind", [Mapped, MappedByTensor])
def test_peers_buffers_lie_where_this_ranks_does(kind):
    handle = kind()
    mine = handle.segments[1][64:128]
    peers = c10d.peer_buffers(handle, mine)
    assert [peers[r].data_ptr() - handle.buffer_ptrs[r] for r in range(2)] == [64, 64]
    assert peers[1] is mine
    handle.segments[1] = handle.segments[1].clone()
    with pytest.raises(RuntimeError, match="Symmetric memory of rank 1 was found at"):
        c10d.peer_buffers(handle, mine)


def test_buffers_are_aligned_halves():
    for size in (1, 31, 32, 33, 1000):
        space = spaces.virtual_workspace("all_reduce", 2, size, "cpu")
        assert space.half_bytes >= size
        assert space.half_bytes % 32 == 0
