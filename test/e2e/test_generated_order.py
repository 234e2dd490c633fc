"""The order that the passes chose, read from the code that Inductor generated for it."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynamo_dist
import inductor_passes as ip
from inductor_passes.inductor.generated_code import order_kept, read_order
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group

pytestmark = pytest.mark.slow
D, B = 64, 32


@pytest.fixture(autouse=True)
def two_fake_ranks():
    torch._dynamo.reset()
    with fake_group(2), fresh_cache():
        yield
    dynamo_dist.disable()
    torch._dynamo.reset()


def gathers(x, *weights):
    """Vertical fusion: each wait's consumer is a matrix product with a pointwise tail."""
    for w in weights:
        x = torch.relu(x @ fc.all_gather_tensor(w, 0, dist.group.WORLD)) * 0.05
    return x


def several_users(x, v, w):
    """Horizontal fusion: pointwise users of a late wait look just like early, independent ones."""
    gathered = fc.all_gather_tensor(v, 0, dist.group.WORLD)
    early = torch.relu(x) * 2
    hidden = x @ w
    late = torch.relu(gathered) * 2
    return early @ w, hidden @ late, gathered.sum(), torch.relu(gathered + 1)


def reduces(x, v, w):
    """A reduction in place, its wait needed by two consumers after independent compute."""
    total = fc.all_reduce(x @ v, "sum", dist.group.WORLD)
    other = torch.relu(x @ w) @ w
    return total * 2, torch.relu(total) + other


def tensors(*shapes, grad):
    torch.manual_seed(0)
    return [torch.randn(*s, requires_grad=grad) for s in shapes]


PROGRAMS = [
    (gathers, [(B, D)] + [(D // 2, D)] * 3),
    (several_users, [(D, D), (D // 2, D), (D, D)]),
    (reduces, [(B, D), (D, D), (D, D)]),
]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("program", "shapes"), PROGRAMS, ids=lambda p: getattr(p, "__name__", ""))
def test_order_survives_lowering(program, shapes, grad):
    inputs = tensors(*shapes, grad=grad)
    model = torch.compile(program, fullgraph=True, options=ip.options(topology="h100x8"))

    def step():
        out = model(*inputs)
        if grad:
            leaves = out if isinstance(out, tuple) else (out,)
            sum(leaf.sum() for leaf in leaves).backward()
        return out

    with recorder.records_of_block() as records, torch.set_grad_enabled(grad):
        out, codes = run_and_get_code(step)
    assert len(codes) == len(records) == (2 if grad else 1)
    for code, record in zip(codes, records, strict=True):
        assert order_kept(record.order, code) is True, (record.order, read_order(code))
    assert any(p.changed for record in records for p in record.passes)
    torch.testing.assert_close(out, program(*inputs))


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def test_order_survives_lowering_of_a_data_parallel_step():
    """Gathers merged by the scheduler, with others launched behind them, then the gradients'
    reductions.
    """
    model = torch.nn.Sequential(*(Block(512) for _ in range(4)))
    mesh = init_device_mesh("cpu", (2,))
    for block in model:
        fully_shard(block, mesh=mesh)
    compiled = torch.compile(model, backend="dynamo_dist", options={"topology": "h100x8"})
    with recorder.records_of_block() as records:
        _, codes = run_and_get_code(lambda: compiled(torch.randn(64, 512)).sum().backward())
    assert len(records) == 2
    for code, record in zip(codes, records, strict=True):
        assert record.order_kept is order_kept(record.order, code) is True
    first, second, *_ = [event for event in read_order(codes[0]) if event.startswith("launch")]
    assert first == second == "launch all_gather"
    assert "all_gather_into_tensor_coalesced" in codes[0]


def test_without_pinning_inductor_undoes_the_order():
    """What pin_order is for: if this ever fails, it is no longer needed."""
    inputs = tensors(*PROGRAMS[0][1], grad=False)
    schedule = {"bucket": False}
    options = ip.options(
        topology="h100x8", schedule=schedule, passes=["schedule"], disable=["pin_order"]
    )
    with recorder.records_of_block() as records, torch.no_grad():
        _, codes = run_and_get_code(torch.compile(gathers, options=options), *inputs)
    assert order_kept(records[0].order, codes[0]) is False


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_no_collective_no_difference(grad):
    """A model without a collective compiles to upstream's very code."""

    def plain(x, w):
        y = torch.relu(x @ w)
        return (y * 2).sum() + (y @ w).tanh().mean()

    def code_of(options):
        torch._dynamo.reset()
        inputs = tensors((B, D), (D, D), grad=grad)

        def step():
            out = torch.compile(plain, options=options)(*inputs)
            if grad:
                out.backward()

        with fresh_cache(), torch.set_grad_enabled(grad):
            codes = run_and_get_code(step)[1]
        # The first line numbers the graphs of this process.
        return [code.partition("\n")[2] for code in codes]

    assert code_of(ip.options()) == code_of(None)


def exchange(x):
    """Rank 0's half: what it launches after a wait on the link, its peer may be waiting for."""
    given, taken = x * 2, torch.empty_like(x)
    sent = dist.isend(given, 1)
    received = dist.irecv(taken, 1)
    turned = given.flip(0)
    sent.wait()
    received.wait()
    return taken + 1, given.cumsum(0) - turned, given


def test_a_send_and_a_receive_start_before_either_is_waited_for():
    model = torch.compile(exchange, backend="dynamo_dist", options={"topology": "h100x8"})
    _, (code,) = run_and_get_code(lambda: model(torch.ones(12, 3)))
    calls = [line for line in code.splitlines() if "torch.ops." in line and "assert" not in line]
    names = ("isend", "irecv", "wait_tensor")
    order = [name for line in calls for name in names if f".{name}.default(" in line]
    assert order == ["isend", "irecv", "wait_tensor", "wait_tensor"]
