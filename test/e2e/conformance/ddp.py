"""Programs of DDP, and of the composable ``replicate``."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import WIDTH, Block, Net, Side, program, train
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


def ddp(**options):
    return lambda model: DDP(model, **options)


@program("ddp")
def plain(side: Side):
    """Gradients are averaged in every backward."""
    train(side, Net, ddp())


@program("ddp", blocks=False)
def small_buckets(side: Side):
    """`bucket_cap_mb`: a launch for each bucket of gradients, not more."""
    train(side, lambda: Net(hidden=64), ddp(bucket_cap_mb=0.002))


@program("ddp")
def views_of_buckets(side: Side):
    """`gradient_as_bucket_view`."""
    train(side, Net, ddp(gradient_as_bucket_view=True))


@program("ddp", eager="static_graph, whose first iteration")
def static_graph(side: Side):
    """`static_graph`: the first step runs in eager mode, where the reducer learns the graph."""
    train(side, Net, ddp(static_graph=True))


class Normed(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class Centred(Net):
    """A buffer that forward reads before it changes it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x):
        y = super().forward(x)
        out = torch.tanh(y - self.centre)
        with torch.no_grad():
            self.centre.lerp_(y.detach().mean(0), 0.5)
        return out


@program("ddp")
def batch_norm(side: Side):
    """BatchNorm in training: running statistics are the first rank's at the next forward."""
    train(side, Normed, ddp())


@program("ddp")
def buffer_read_by_forward(side: Side):
    """A buffer that training reads is the first rank's before a forward, and each rank's own
    behind it.
    """
    train(side, Centred, ddp())


@program("ddp")
def buffers_after_evaluation(side: Side):
    """After a forward without gradients, buffers are not broadcast."""
    _, call, optimizer = side.make(Centred, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
        with torch.no_grad():
            for k in range(i % 3):
                side.keep(call(side.batch(i, seed=k + 1)))


@program("ddp")
def buffers_within_no_sync(side: Side):
    """Within `no_sync()`, buffers are not broadcast."""
    accumulate(side, Centred, ddp(), "local local sync")


@program("ddp")
def buffers_of_each_rank(side: Side):
    """`broadcast_buffers=False`."""
    train(side, Centred, ddp(broadcast_buffers=False))


@program("ddp")
def evaluation_mode(side: Side):
    """`eval()` and `train()` in turns."""
    model, call, optimizer = side.make(Normed, ddp())
    for i in side.steps():
        model.train(i % 2 == 0)
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("ddp")
def evaluation_on_one_rank(side: Side):
    """A forward without gradients on the first rank alone, behind one on all."""
    _model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
        with torch.no_grad():
            call(side.batch(i))
            if side.rank == 0:
                call(side.batch(i, seed=1))


def accumulate(side, net, wrap, calls, zero=True, call_eagerly=()):
    """Steps of several micro-batches: ``calls`` names each "local", within no_sync(), or "sync"."""
    model, call, optimizer = side.make(net, wrap)
    for i in side.steps():
        if zero:
            optimizer.zero_grad()
        for k, how in enumerate(calls.split()):
            with model.no_sync() if how == "local" else contextlib.nullcontext():
                run = model if k in call_eagerly else call
                side.backward(run(side.batch(i, seed=k)).square().mean() / len(calls.split()))
        optimizer.step()


@program("ddp")
def no_sync(side: Side):
    """Gradients within `no_sync()` are this rank's own; the last backward averages all that was
    accumulated, once.
    """
    accumulate(side, Net, ddp(), "local local local sync")


@program("ddp", fewer=False)
def no_sync_alone(side: Side):
    """Steps that never synchronise: local SGD."""
    accumulate(side, Net, ddp(), "local")


@program("ddp")
def no_sync_eager_then_compiled(side: Side):
    """Micro-batches in eager mode, the last one compiled."""
    accumulate(side, Net, ddp(), "local local sync", call_eagerly=(0, 1))


@program("ddp")
def no_sync_compiled_then_eager(side: Side):
    """Micro-batches compiled, the last one in eager mode."""
    accumulate(side, Net, ddp(), "local local sync", call_eagerly=(2,))


@program("ddp")
def accumulated_averages(side: Side):
    """Several backwards that all synchronise: what was averaged before is averaged again."""
    accumulate(side, Net, ddp(), "sync sync")


@program("ddp")
def gradients_from_before(side: Side):
    """Gradients are never set to zero."""
    accumulate(side, Net, ddp(), "sync", zero=False)


@program("ddp")
def backward_outside_of_no_sync(side: Side):
    """The forward within `no_sync()` decides, not the backward."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        with model.no_sync():
            loss = call(side.batch(i)).square().mean()
        side.backward(loss)
        with model.no_sync():
            side.backward(call(side.batch(i, seed=1)).square().mean())
        side.backward(call(side.batch(i, seed=2)).square().mean())
        optimizer.step()


@program("ddp")
def set_to_zero(side: Side):
    """`zero_grad(set_to_none=False)`."""
    _, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad(set_to_none=False)
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("ddp")
def zero_between(side: Side):
    """`zero_grad()` between forward and backward."""
    _, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        loss = call(side.batch(i)).square().mean()
        optimizer.zero_grad()
        side.backward(loss)
        optimizer.step()


class Heads(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x, which=0):
        return (self.other if which else self.head)(self.features(x))


def heads(side, choose, wrap):
    _, call, optimizer = side.make(Heads, wrap)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i), choose(i)).square().mean())
        optimizer.step()


UNUSED = ddp(find_unused_parameters=True)


@program("ddp")
def find_unused_all_used(side: Side):
    """`find_unused_parameters` where all are used."""
    train(side, Net, UNUSED)


@program("ddp")
def find_unused_everywhere(side: Side):
    """A parameter that no rank uses keeps `.grad` as it was: None."""
    heads(side, lambda i: 0, UNUSED)


@program("ddp")
def find_unused_by_step(side: Side):
    """Another head in each step, the same on all ranks."""
    heads(side, lambda i: i % 2, UNUSED)


@program("ddp")
def find_unused_by_rank(side: Side):
    """Each rank uses another head; who uses none takes part with zeros."""
    heads(side, lambda i: (i + side.rank) % 2, UNUSED)


@program("ddp")
def find_unused_by_some_ranks(side: Side):
    """Ranks use the same head in some steps and different ones in others."""
    heads(side, lambda i: (0b011001 >> i & 1) & side.rank, UNUSED)


@program("ddp")
def find_unused_and_no_sync(side: Side):
    """Used is what any micro-batch used."""
    model, call, optimizer = side.make(Heads, UNUSED)
    for i in side.steps():
        optimizer.zero_grad()
        for k in range(3):
            with model.no_sync() if k < 2 else contextlib.nullcontext():
                which = (i + k + side.rank) % 2 if i % 2 else 0
                side.backward(call(side.batch(i, seed=k), which).square().mean())
        optimizer.step()


@program("ddp", eager="is not read in its forward")
def weight_outside_alone(side: Side):
    """A parameter that only the loss reads (a chunked or tied head)."""

    class Body(Net):
        def forward(self, x):
            return self.features(x)

    model, call, optimizer = side.make(Body, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward((call(side.batch(i)) @ model.module.head.weight.t()).square().mean())
        optimizer.step()


@program("ddp")
def weight_inside_and_outside(side: Side):
    """A parameter that forward and loss read: the average is of both."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        out = call(side.batch(i))
        side.backward((out @ model.module.head.weight).square().mean())
        optimizer.step()


@program("ddp")
def weight_outside_on_one_rank(side: Side):
    """The loss of the first rank alone reads a parameter, in some steps."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        loss = call(side.batch(i)).square().mean()
        if side.rank == 0 and i % 2:
            loss = loss + model.module.head.weight.square().sum()
        side.backward(loss)
        optimizer.step()


@program("ddp")
def penalty_on_all_parameters(side: Side):
    """A penalty on all parameters behind the forward."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        loss = call(side.batch(i)).square().mean()
        side.backward(loss + 0.01 * sum(param.square().sum() for param in model.parameters()))
        optimizer.step()


@program("ddp")
def loss_in_the_compiled_function(side: Side):
    """Forward and a loss that reads a parameter, compiled together."""
    model, _, optimizer = side.make(Net, ddp())

    def whole(x):
        return (model(x) @ model.module.head.weight).square().mean()

    call = side.compiled(whole)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)))
        optimizer.step()


@program("ddp")
def parameter_hook(side: Side):
    """`register_hook` on a parameter sees this rank's gradient before the average."""
    model, call, optimizer = side.make(Net, ddp())
    seen = []
    model.module.head.weight.register_hook(
        lambda grad: seen.append(grad.sum()) or grad * (1 + side.rank)
    )
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
    side.keep(*seen)


@program("ddp")
def parameter_hook_on_one_rank(side: Side):
    """A hook that watches gradients on the first rank alone, put there after some steps, and
    taken away again.
    """
    model, call, optimizer = side.make(Net, ddp())
    seen = []
    for i in side.steps():
        if side.rank == 0 and i == 2:
            handle = model.module.head.weight.register_hook(lambda grad: seen.append(grad.sum()))
        if side.rank == 0 and i == 4:
            handle.remove()
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
    side.keep(*seen)


@program("ddp")
def parameter_hook_and_no_sync(side: Side):
    """A parameter's hook sees each micro-batch's gradient."""
    model, call, optimizer = side.make(Net, ddp())
    model.module.head.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    for i in side.steps():
        optimizer.zero_grad()
        for k in range(2):
            with model.no_sync() if k < 1 else contextlib.nullcontext():
                side.backward(call(side.batch(i, seed=k)).square().mean())
        optimizer.step()


@program("ddp", eager="hook behind accumulation")
def post_accumulate_hook(side: Side):
    """`register_post_accumulate_grad_hook` sees the gradient before the average."""
    model, call, optimizer = side.make(Net, ddp())
    seen = []
    weight = model.module.head.weight
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.sum()))
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
    side.keep(*seen)


@program("ddp")
def module_forward_hook_late(side: Side):
    """A forward hook that is put on a module after some steps."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        if i == 2:
            handle = model.module.head.register_forward_hook(lambda module, args, out: out * 2)
        if i == 4:
            handle.remove()
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("ddp")
def module_backward_hook_late(side: Side):
    """A full backward hook that is put on a module after some steps, and scales its gradient."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        if i == 2:
            block = model.module.blocks[1]
            block.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("ddp", fewer=False)
def two_forwards(side: Side):
    """Two forwards, and one backward of both losses."""
    _, call, optimizer = side.make(Centred, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        loss = call(side.batch(i)).square().mean() + call(side.batch(i, seed=1)).abs().mean()
        side.backward(loss)
        optimizer.step()


@program("ddp", fewer=False)
def two_forwards_two_backwards(side: Side):
    """Two forwards, then a backward of each: DDP averages in the first one alone."""
    _, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        losses = [call(side.batch(i, seed=k)).square().mean() for k in range(2)]
        for loss in losses:
            side.backward(loss)
        optimizer.step()


@program("ddp")
def two_forwards_in_one_graph(side: Side):
    """Two forwards in one compiled function, with buffers broadcast before each."""
    model, _, optimizer = side.make(Centred, ddp())

    def whole(x, y):
        return model(x).square().mean() + model(y).abs().mean()

    call = side.compiled(whole)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i), side.batch(i, seed=1)))
        optimizer.step()


@program("ddp", fewer=False)
def backward_twice(side: Side):
    """`retain_graph`: the second backward adds gradients of this rank's own."""
    _, call, optimizer = side.make(Net, ddp())
    with torch._functorch.config.patch(donated_buffer=False):  # as torch says where it cannot
        for i in side.steps():
            optimizer.zero_grad()
            loss = call(side.batch(i)).square().mean()
            side.backward(loss, retain_graph=True)
            side.backward(loss)
            optimizer.step()


@program("ddp", fewer=False)
def two_models(side: Side):
    """A generator and a discriminator, each with its DDP and optimizer."""
    _make, generate, first = side.make(lambda: Net(out=WIDTH), ddp())
    judge, value, second = side.make(Net, ddp())
    for i in side.steps():
        second.zero_grad()
        fake = generate(side.batch(i))
        loss = value(fake.detach()).square().mean() - value(side.batch(i, seed=1)).mean()
        side.backward(loss)
        second.step()
        first.zero_grad()
        for param in judge.parameters():
            param.requires_grad_(False)
        side.backward(value(fake).abs().mean())
        for param in judge.parameters():
            param.requires_grad_(True)
        first.step()


@program("ddp")
def teacher_and_student(side: Side):
    """A student that learns from a running average of itself."""
    model, call, optimizer = side.make(Net, ddp())
    torch.manual_seed(1)
    teacher = Net().requires_grad_(False)
    for i in side.steps():
        optimizer.zero_grad()
        x = side.batch(i)
        with torch.no_grad():
            want = teacher(x)
        side.backward(F.mse_loss(call(x), want + 1))
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.1)


@program("ddp", fewer=False)
def exception_in_backward(side: Side):
    """A backward that raises, and training that goes on."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    _, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        out = call(side.batch(i))
        if i == 2:
            with contextlib.suppress(ZeroDivisionError):
                Fails.apply(out).sum().backward()
            continue
        side.backward(out.square().mean())
        optimizer.step()


@program("ddp")
def state_dict_loaded(side: Side):
    """A state that is saved and loaded again between steps."""
    model, call, optimizer = side.make(Normed, ddp())
    for i in side.steps():
        if i == 2:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        if i == 4:
            model.load_state_dict(saved)
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("ddp")
def parameters_with_new_data(side: Side):
    """`param.data` set to other tensors between steps."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        if i == 3:
            for param in model.parameters():
                param.data = param.data * 0.5
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("ddp")
def frozen_parameters(side: Side):
    """Parameters that need no gradient from the start."""

    def net():
        model = Net()
        model.head.requires_grad_(False)
        return model

    train(side, net, ddp())


@program("ddp")
def clipped(side: Side):
    """`clip_grad_norm_` between backward and step."""
    model, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        loss = call(side.batch(i)).square().mean()
        loss.backward()
        side.keep(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()


@program("ddp", eager="communication hook")
def communication_hook(side: Side):
    """`register_comm_hook`."""

    def wrap(model):
        model = DDP(model)
        model.register_comm_hook(None, allreduce_hook)
        return model

    train(side, Net, wrap)


@program("ddp", eager="sparse gradients")
def sparse_embedding(side: Side):
    """`nn.Embedding(sparse=True)`: its gradient is gathered, not summed."""
    make = lambda: nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 4))  # noqa: E731
    torch.manual_seed(1)
    model = DDP(make())
    side.models.append(model)
    call = side.compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in side.steps():
        optimizer.zero_grad()
        ids = torch.randint(0, 10, (4 + side.rank,), generator=torch.Generator().manual_seed(i))
        side.backward(call(ids).square().mean())
        optimizer.step()


@program("ddp", tolerance=2e-2)
def autocast(side: Side):
    """`torch.autocast` around forward, behind steps in float32."""
    _, call, optimizer = side.make(Net, ddp())
    for i in side.steps():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 3 != 0):
            out = call(side.batch(i))
        side.backward(out.float().square().mean())
        optimizer.step()


class Recomputed(Net):
    def features(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@program("ddp")
def recomputed(side: Side):
    """Blocks in `torch.utils.checkpoint`."""
    train(side, Recomputed, ddp())


@program("ddp")
def structured_outputs(side: Side):
    """Outputs in dictionaries and tuples, of which the loss reads a part."""

    class Parts(Net):
        def forward(self, x):
            h = self.features(x)
            return {"out": self.head(h), "rest": (h, h.detach())}

    train(side, Parts, UNUSED, loss=lambda out: out["out"].square().mean())


@program("ddp", eager="torch._dynamo.graph_break()", fewer=False)
def graph_break_inside(side: Side):
    """A graph break in the forward: DDP runs in eager mode around the pieces."""

    class Breaks(Net):
        def forward(self, x):
            h = self.features(x)
            torch._dynamo.graph_break()
            return self.head(h)

    train(side, Breaks, ddp())


@program("ddp", eager="no counterpart of its join()")
def joined(side: Side):
    """`join()`: ranks with other numbers of batches."""
    model, call, optimizer = side.make(Net, ddp())
    with model.join():
        for i in range(4 + side.rank):
            optimizer.zero_grad()
            call(side.batch(i)).square().mean().backward()
            optimizer.step()


@program("ddp")
def tied_weights(side: Side):
    """One parameter in two modules."""

    class Tied(Net):
        def __init__(self):
            super().__init__(out=WIDTH)
            self.again = nn.Linear(WIDTH, WIDTH, bias=False)
            self.again.weight = self.head.weight

        def forward(self, x):
            return self.again(super().forward(x))

    train(side, Tied, ddp())


@program("ddp")
def one_process_group_of_all(side: Side):
    """`process_group` given."""
    train(side, Net, ddp(process_group=dist.group.WORLD))


@program("ddp")
def float64(side: Side):
    """Parameters in float64 beside float32: a bucket has one dtype."""

    class Both(Net):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(4, 2, bias=False, dtype=torch.float64)

        def forward(self, x):
            return self.wide(super().forward(x).double())

    train(side, Both, ddp())


@program("ddp")
def inner_module_wrapped(side: Side):
    """DDP inside the model that is compiled."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.last = DDP(Net(out=WIDTH)), Block()

        def forward(self, x):
            return self.last(self.inner(x))

    def wrap(model):
        return model

    _, call, optimizer = side.make(Outer, wrap)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("replicate")
def composed(side: Side):
    """Gradients are averaged in every backward."""
    train(side, Net, replicate)


@program("replicate")
def hooked(side: Side):
    """A parameter's hook, and a use outside of the forward."""
    model, call, optimizer = side.make(Net, replicate)
    model.head.weight.register_hook(lambda grad: grad * (1 + side.rank))
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("replicate")
def weight_in_loss(side: Side):
    """A parameter that forward and loss read."""
    model, call, optimizer = side.make(Net, replicate)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward((call(side.batch(i)) @ model.head.weight).square().mean())
        optimizer.step()


@program("replicate")
def synchronized_last(side: Side):
    """`set_requires_gradient_sync`."""
    model, call, optimizer = side.make(Net, replicate)
    for i in side.steps():
        optimizer.zero_grad()
        for k in range(3):
            model.set_requires_gradient_sync(k == 2)
            side.backward(call(side.batch(i, seed=k)).square().mean())
        optimizer.step()
