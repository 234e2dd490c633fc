"""Trainings of wrapped modules: each program twice from equal weights, as FSDP2 or DDP run it and
compiled.

Compiled means the whole way up to the graph passes; the graphs then run as they are, so that a
program takes seconds.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Container
from types import SimpleNamespace

import torch
import torch.distributed as dist
from nets import Net
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

STEPS = 20
MIXED = (0, 5, 6, 13)  # steps that the compiled side runs in eager mode too
PROGRAMS = {2: {}, 4: {}}


def program(ranks, sweep=False):
    """Register a function that trains, under its name, for so many ranks; ``sweep``: others show
    most of it too.
    """

    def register(function):
        PROGRAMS[ranks][function.__name__] = function
        return function

    return register


def line():
    """All ranks in a row."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def grid():
    """Four ranks as two pairs."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


class Side:
    """One of two trainings: ``eager`` is what is called of the model, ``compiled`` the same
    compiled if this side is.
    """

    def __init__(self, model, eager, is_compiled):
        self.model, self.eager, self.is_compiled = model, eager, is_compiled
        self.compiled = compiled(eager) if is_compiled else eager
        self.call = self.compiled  # in the step under way
        self.start = [local(each).detach().clone() for each in self.values()]

    def values(self):
        return [*self.model.parameters(), *self.model.buffers()]

    def reset(self, optimizer):
        if isinstance(self.model, FSDPModule):
            for each in self.model.modules():
                if isinstance(each, FSDPModule):
                    each.reshard()
        self.optimizer = optimizer(self.model.parameters())
        self.optimizer.zero_grad()
        with torch.no_grad():
            for value, start in zip(self.values(), self.start, strict=True):
                local(value).copy_(start)


def batch(step, dtype=torch.float32, rows=4, ranks=None):
    """Rows of this rank's own for a step; ranks that share a value of ``ranks`` get equal ones."""
    seed = 100 * step + (dist.get_rank() if ranks is None else ranks)
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(side, x, step):
    """A step of training as most programs write it; its loss."""
    side.optimizer.zero_grad()
    loss = side.call(x).square().mean()
    loss.backward()
    side.optimizer.step()
    return loss


def micro_batches(settle, calls):
    """A step of several backward passes. ``calls``: "e" is eager, "c" compiled; before each,
    ``settle(model, is_last)``.
    """

    def step(side, x, i):
        side.optimizer.zero_grad()
        total = 0
        for number, how in enumerate(calls):
            settle(side.model, number == len(calls) - 1)
            call = side.compiled if how == "c" and side.call is side.compiled else side.eager
            loss = call(x.roll(number, 1)).square().mean() / len(calls)
            loss.backward()
            total = total + loss.detach()
        side.optimizer.step()
        return total

    return step


# Of operators: the kind, and which argument is counted.
KINDS = {
    "_allgather_base_": ("all_gather", 0),
    "all_gather_into_tensor": ("all_gather", "out"),
    "all_gather_into_tensor_out": ("all_gather", "out"),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "alltoall_base_": ("reduce_scatter", 1),
    "all_to_all_single": ("reduce_scatter", 0),  # in its place on gloo: scatter_by_exchange
    "allreduce_": ("all_reduce", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", "out"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "allgather_": ("all_gather", "list"),
}


class Launches(TorchDispatchMode):
    """Launches that run inside, by kind, and their bytes: of what is gathered, or of what is
    reduced.
    """

    def __init__(self):
        super().__init__()
        self.counts, self.bytes, self.unknown = Counter(), Counter(), Counter()

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # a DTensor's own dispatch launches what is to be seen
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.split("::")[1]
            if name in KINDS:
                kind, payload = KINDS[name]
                of = out if payload == "out" else args[0 if payload == "list" else payload]
                self.counts[kind] += 1
                self.bytes[kind] += sum(
                    t.numel() * t.element_size()
                    for t in torch.utils._pytree.tree_leaves(of)
                    if isinstance(t, torch.Tensor)
                )
            elif name not in ("wait_tensor", "_wrap_tensor_autograd"):
                self.unknown[name] += 1
        return out


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def weights(model):
    with torch.no_grad():
        return [whole(param).detach().clone() for param in model.parameters()]


def names(model):
    """What a user can see of a model from outside: nothing of it changes."""
    return (
        [type(each) for each in model.modules()],
        [(name, id(param)) for name, param in model.named_parameters()],
        [(name, value.shape) for name, value in model.state_dict().items()],
    )


def compiled(function, **options):
    return torch.compile(
        function,
        backend="dynamo_dist",
        fullgraph=True,
        options={"fallback_random": True},
        **options,
    )


class Pair:
    """A model as its wrapper runs it and one compiled, for one training or, one after the other,
    for more.

    ``calls(model)``: what is called, and compiled, of the model. ``unequal``: ranks have batches of
    different lengths; those that share a ``data_rank`` have equal ones. ``graphs``: how many are
    compiled at most, by all its trainings.
    """

    def __init__(
        self,
        wrap: Callable[[nn.Module], nn.Module],
        net: Callable[[], nn.Module] = Net,
        *,
        calls: Callable[[nn.Module], Callable[..., object]] = lambda model: model,
        dtype: torch.dtype = torch.float32,
        unequal: bool = False,
        data_rank: int | None = None,
        graphs: int = 1,
    ):
        self.most_graphs = graphs
        self.rank = dist.get_rank() if data_rank is None else data_rank
        self.rows = 3 + 2 * self.rank if unequal else 4
        torch.manual_seed(1)
        base = net().to(dtype)
        models = [wrap(copy.deepcopy(base)) for _ in range(2)]
        self.dtype = dtype
        self.sides = [Side(model, calls(model), i == 1) for i, model in enumerate(models)]
        self.graphs = 0

    def train(
        self,
        step: Callable[..., torch.Tensor] = plain,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = sgd,
        mixed: Container[int] = (),
        tolerance: float | None = None,
        merged: bool = True,
    ):
        """Train twice from the start; compare losses, weights, graphs, launches and bytes.

        ``mixed``: the steps that run in eager mode on both sides. ``merged``: launches are no more
        than eager mode's, by kind.
        """
        counters = torch._dynamo.utils.counters
        results = []
        for side in self.sides:
            side.reset(optimizer)
            before = names(side.model)
            losses = []
            for i in range(STEPS):
                torch.manual_seed(1000 * self.rank + i)
                side.call = side.eager if i in mixed else side.compiled
                with contextlib.nullcontext() if i < STEPS - 1 else Launches() as launches:
                    loss = step(side, batch(i, self.dtype, self.rows, self.rank), i)
                losses.append(loss.detach().to(torch.float64).reshape(()))
            assert before == names(side.model)
            results.append((torch.stack(losses), weights(side.model), launches))
        (losses, params, eager), (losses2, params2, ours) = results
        close = tolerance or (1e-10 if self.dtype == torch.float64 else 1e-6)
        wide = 20 * close if optimizer is adamw and close == 1e-6 else close
        torch.testing.assert_close(losses2, losses, rtol=close, atol=close)
        for one, other in zip(params2, params, strict=True):
            torch.testing.assert_close(one, other, rtol=wide, atol=wide)
        assert losses.isfinite().all() and losses[-1] != losses[0]
        self.graphs += counters["stats"]["unique_graphs"]
        assert 0 < self.graphs <= self.most_graphs, dict(counters["stats"])
        assert not counters["graph_break"]
        counters.clear()
        compare(eager, ours, merged)


def train(
    wrap,
    net=Net,
    *,
    calls=lambda model: model,
    dtype=torch.float32,
    unequal=False,
    data_rank=None,
    graphs=1,
    **training,
):
    """Train a pair of its own; return its sides."""
    pair = Pair(
        wrap, net, calls=calls, dtype=dtype, unequal=unequal, data_rank=data_rank, graphs=graphs
    )
    pair.train(**training)
    return pair.sides


def train_with_breaks(wrap, base, steps, rows=4, before=lambda model, step: None):
    """Train some steps from ``base`` in eager mode, then without ``fullgraph``: the weights are
    the same.
    """
    found = []
    for is_compiled in (False, True):
        model = wrap(copy.deepcopy(base))
        call = torch.compile(model, backend="dynamo_dist") if is_compiled else model
        side = SimpleNamespace(call=call, optimizer=sgd(model.parameters()))
        for i in range(steps):
            before(model, i)
            plain(side, batch(i, rows=rows), i)
        found.append(weights(model))
    torch.testing.assert_close(*found)


def compare(eager, ours, merged):
    assert not eager.unknown and not ours.unknown, (eager.unknown, ours.unknown)
    LAUNCHED.append((eager.counts, ours.counts, eager.bytes, ours.bytes))
    assert eager.counts and ours.counts.keys() == eager.counts.keys(), LAUNCHED[-1]
    for kind, count in eager.counts.items():
        assert ours.counts[kind] <= count or not merged, LAUNCHED[-1]
        assert ours.bytes[kind] <= eager.bytes[kind], LAUNCHED[-1]


LAUNCHED = []  # what each comparison of a program found
