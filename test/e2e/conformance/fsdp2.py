"""Programs of FSDP2."""

import torch
from harness import WIDTH, Net, Side, local, program, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint


def line():
    return init_device_mesh("cpu", (2,))


def copies():
    """Two copies, of one shard each: HSDP on two ranks."""
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def sharded(mesh=line, **options):
    def wrap(model):
        on = mesh()
        for block in model.blocks:
            fully_shard(block, mesh=on, **options)
        return fully_shard(model, mesh=on, **options)

    return wrap


@program("fsdp2")
def plain(side: Side):
    """Gradients are reduced in every backward."""
    train(side, Net, sharded())


@program("fsdp2")
def kept_behind_forward(side: Side):
    """`reshard_after_forward=False`."""
    train(side, Net, sharded(reshard_after_forward=False))


@program("fsdp2")
def resharded_to_fewer_ranks(side: Side):
    """`reshard_after_forward` as a number."""
    train(side, Net, sharded(reshard_after_forward=2))


@program("fsdp2")
def one_group(side: Side):
    """The whole model in one group."""
    train(side, Net, lambda model: fully_shard(model, mesh=line()))


@program("fsdp2", fewer=False)
def modules_of_one_group(side: Side):
    """`fully_shard` of a list of modules."""

    def wrap(model):
        mesh = line()
        fully_shard([*model.blocks], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    train(side, Net, wrap)


@program("fsdp2")
def ragged(side: Side):
    """Rows that do not divide by the ranks."""
    train(side, lambda: Net(out=3, hidden=5), sharded())


@program("fsdp2")
def columns(side: Side):
    """`shard_placement_fn`: another dimension than the first."""
    placement = lambda param: Shard(param.ndim - 1)  # noqa: E731
    train(side, lambda: Net(hidden=4), sharded(shard_placement_fn=placement))


@program("fsdp2", tolerance=2e-2)
def mixed_precision(side: Side):
    """`MixedPrecisionPolicy`: parameters in bfloat16, sums in float32."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    train(side, Net, sharded(mp_policy=policy), loss=lambda out: out.float().square().mean())


@program("fsdp2", tolerance=2e-2)
def output_dtype(side: Side):
    """`MixedPrecisionPolicy(output_dtype=...)` of the root."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    train(side, Net, lambda model: fully_shard(model, mesh=line(), mp_policy=policy))


def synchronize(model, is_last):
    model.set_requires_gradient_sync(is_last)


def accumulate(side, wrap, settle=synchronize, calls=3, net=Net, call_eagerly=(), zero=True):
    model, call, optimizer = side.make(net, wrap)
    for i in side.steps():
        if zero:
            optimizer.zero_grad()
        for k in range(calls):
            settle(model, k == calls - 1)
            run = model if k in call_eagerly else call
            side.backward(run(side.batch(i, seed=k)).float().square().mean() / calls)
        optimizer.step()


@program("fsdp2")
def synchronized_last(side: Side):
    """`set_requires_gradient_sync(False)`: `.grad` stays as it is, and the last backward reduces
    all, once.
    """
    accumulate(side, sharded())


@program("fsdp2", tolerance=2e-2)
def synchronized_last_mixed_precision(side: Side):
    """Gradients that wait are summed in `reduce_dtype`."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    accumulate(side, sharded(mp_policy=policy))


@program("fsdp2")
def synchronized_last_ragged(side: Side):
    """Gradients that wait, of rows that do not divide by the ranks."""
    accumulate(side, sharded(), net=lambda: Net(out=3, hidden=5))


@program("fsdp2")
def synchronized_last_eager_then_compiled(side: Side):
    """Micro-batches in eager mode, the last one compiled."""
    accumulate(side, sharded(), call_eagerly=(0, 1))


@program("fsdp2")
def synchronized_last_compiled_then_eager(side: Side):
    """Micro-batches compiled, the last one in eager mode."""
    accumulate(side, sharded(), call_eagerly=(2,))


@program("fsdp2")
def synchronized_always(side: Side):
    """Several backwards that all reduce."""
    accumulate(side, sharded(), settle=lambda model, is_last: None)


@program("fsdp2")
def gradients_from_before(side: Side):
    """Gradients are never set to zero."""
    accumulate(side, sharded(), calls=1, zero=False)


@program("fsdp2")
def blocks_synchronize_last(side: Side):
    """`set_requires_gradient_sync(recurse=False)`: some groups wait, others do not."""

    def settle(model, is_last):
        model.blocks[0].set_requires_gradient_sync(is_last)

    accumulate(side, sharded(), settle=settle)


@program("fsdp2")
def last_backward(side: Side):
    """`set_is_last_backward`."""

    def settle(model, is_last):
        synchronize(model, is_last)
        model.set_is_last_backward(is_last)

    accumulate(side, sharded(), settle=settle)


@program("fsdp2", eager="set_reshard_after_backward", fewer=False)
def not_resharded_after_backward(side: Side):
    """`set_reshard_after_backward(False)` between micro-batches."""

    def settle(model, is_last):
        synchronize(model, is_last)
        model.set_reshard_after_backward(is_last)

    accumulate(side, sharded(), settle=settle)


@program("hsdp")
def plain_copies(side: Side):
    """Gradients are reduced over shards, then over copies."""
    train(side, Net, sharded(copies))


@program("hsdp")
def synchronized_last_copies(side: Side):
    """`set_requires_gradient_sync(False)`."""
    accumulate(side, sharded(copies))


def all_reduce_last(model, is_last):
    model.set_requires_all_reduce(is_last)


@program("hsdp")
def all_reduced_last(side: Side):
    """`set_requires_all_reduce(False)`: reduced over shards alone, until the last backward."""
    accumulate(side, sharded(copies), settle=all_reduce_last)


@program("hsdp")
def all_reduced_last_eager_then_compiled(side: Side):
    """Micro-batches in eager mode, the last one compiled."""
    accumulate(side, sharded(copies), settle=all_reduce_last, call_eagerly=(0, 1))


@program("hsdp")
def all_reduced_last_compiled_then_eager(side: Side):
    """Micro-batches compiled, the last one in eager mode."""
    accumulate(side, sharded(copies), settle=all_reduce_last, call_eagerly=(2,))


@program("fsdp2")
def prefetched(side: Side):
    """`set_modules_to_forward_prefetch` and `set_modules_to_backward_prefetch`."""

    def wrap(model):
        model = sharded()(model)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
        return model

    train(side, Net, wrap)


@program("fsdp2")
def parameter_hook(side: Side):
    """`register_hook` on a sharded parameter: FSDP2 never calls it."""
    model, call, optimizer = side.make(Net, sharded())
    model.head.weight.register_hook(lambda grad: grad * 3)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2")
def parameter_hook_synchronized_last(side: Side):
    """`register_hook` on a parameter whose gradient waits: not called either, not even with
    None.
    """

    def wrap(model):
        model = sharded()(model)
        model.blocks[0].up.weight.register_hook(lambda grad: grad * 2)
        return model

    accumulate(side, wrap)


@program("fsdp2", blocks=False)
def gathered_parameter_hook(side: Side):
    """`register_hook` on a parameter that a forward has left gathered, on one rank: it sees this
    rank's gradient in each backward, until it is taken away.
    """
    seen = []

    def watch(grad):
        seen.append(grad.sum())
        return grad * 1.5

    model, call, optimizer = side.make(Net, sharded(reshard_after_forward=False))
    for i in side.steps():
        optimizer.zero_grad()
        if i == 1:
            with torch.no_grad():
                call(side.batch(i))
            if side.rank == 0:
                handles = [
                    each.weight.register_hook(watch)
                    for each in (model.head, model.blocks[0].up, model.blocks[1].down)
                ]
        if i == 4 and side.rank == 0:
            handles[0].remove()
        # Hooks that compiled calls have met are there in eager mode, and the other way round.
        side.backward((model if i == 3 else call)(side.batch(i)).square().mean())
        optimizer.step()
    side.keep(*sorted(seen))


@program("fsdp2", blocks=False)
def gathered_parameter_hook_synchronized_last(side: Side):
    """`register_hook` on a gathered parameter sees each micro-batch's gradient."""
    model, call, optimizer = side.make(Net, sharded())
    with torch.no_grad():
        call(side.batch(0))
    model.head.weight.register_hook(lambda grad: grad.clamp(-0.05, 0.05))
    for i in side.steps():
        model.set_requires_gradient_sync(i % 2 == 1)
        side.backward(call(side.batch(i)).square().mean())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


@program("fsdp2")
def post_accumulate_hook(side: Side):
    """`register_post_accumulate_grad_hook`: called on the reduced gradient."""
    model, call, optimizer = side.make(Net, sharded())
    seen = []
    model.head.weight.register_post_accumulate_grad_hook(
        lambda param: seen.append(param.grad.to_local().sum())
    )
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
    side.keep(*seen)


@program("fsdp2")
def optimizer_in_backward(side: Side):
    """An optimizer for each parameter that steps behind its gradient."""
    model, call, _ = side.make(Net, sharded())
    for param in model.parameters():
        own = side.optimizer([param])

        def step(param, own=own):
            own.step()
            own.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for i in side.steps():
        side.backward(call(side.batch(i)).square().mean())


@program("fsdp2", blocks=False)
def module_forward_hook_late(side: Side):
    """A forward hook that is put on a module after some steps, and taken away."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        if i == 2:
            handle = model.blocks[0].up.register_forward_hook(lambda module, args, out: out * 2)
        if i == 4:
            handle.remove()
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2", blocks=False)
def module_backward_hook_late(side: Side):
    """A full backward hook that is put on a module after some steps."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        if i == 2:
            up = model.blocks[1].up
            up.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 2,))
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2", eager="the forward does not read it", fewer=False)
def weight_outside_alone(side: Side):
    """A parameter of the root that only the loss reads: it stays gathered behind the forward."""

    class Body(Net):
        def forward(self, x):
            return self.features(x)

    model, call, optimizer = side.make(Body, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward((call(side.batch(i)) @ model.head.weight.t()).square().mean())
        optimizer.step()


@program("fsdp2")
def weight_inside_and_outside(side: Side):
    """A parameter of the root that forward and loss read: its gradient is of both."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        out = call(side.batch(i))
        side.backward(out.square().mean() + model.head.weight.pow(3).mean())
        optimizer.step()


@program("fsdp2", blocks=False, fewer=False)
def weight_of_block_behind_evaluation(side: Side):
    """`reshard_after_forward=False`: a loss of its own of a parameter that a forward without
    gradients left gathered.
    """
    model, call, optimizer = side.make(Net, sharded(reshard_after_forward=False))
    for i in side.steps():
        optimizer.zero_grad()
        with torch.no_grad():
            call(side.batch(i))
        model.blocks[1].up.weight.pow(3).mean().backward()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2", fewer=False)
def kept_and_shared_block(side: Side):
    """`reshard_after_forward=False`: a block that runs twice, and one that no gradient reaches."""

    class Twice(Net):
        def forward(self, x):
            with torch.no_grad():
                y = self.blocks[1](x)
            return self.head(self.blocks[0](self.blocks[0](x)) + y)

    model, call, optimizer = side.make(Twice, sharded(reshard_after_forward=False))
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        side.keep(torch.tensor([each.numel() for each in map(local, model.parameters())]))
        optimizer.step()


@program("fsdp2", fewer=False)
def two_forwards(side: Side):
    """Two forwards, and one backward of both losses."""
    _, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(
            call(side.batch(i)).square().mean() + call(side.batch(i, seed=1)).abs().mean()
        )
        optimizer.step()


@program("fsdp2")
def two_forwards_in_one_graph(side: Side):
    """Two forwards in one compiled function."""
    model, _, optimizer = side.make(Net, sharded())

    def whole(x, y):
        return model(x).square().mean() + model(y).abs().mean()

    call = side.compiled(whole)
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i), side.batch(i, seed=1)))
        optimizer.step()


@program("fsdp2", fewer=False)
def two_models(side: Side):
    """A generator and a discriminator."""
    _, generate, first = side.make(lambda: Net(out=WIDTH), sharded())
    _, value, second = side.make(Net, sharded())
    for i in side.steps():
        first.zero_grad()
        second.zero_grad()
        fake = generate(side.batch(i))
        side.backward(value(fake.detach()).square().mean())
        second.step()
        second.zero_grad()
        side.backward(value(fake).abs().mean())
        first.step()


@program("fsdp2")
def evaluated_between(side: Side):
    """Forwards without gradients between steps."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
        model.eval()
        with torch.no_grad():
            side.found.append(call(side.batch(i, seed=1)).clone())
        model.train()


@program("fsdp2")
def evaluated_in_eager_mode(side: Side):
    """Forwards without gradients in eager mode, which leave the root gathered."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()
        with torch.no_grad():
            side.found.append(model(side.batch(i, seed=1)).clone())


@program("fsdp2", tolerance=2e-2)
def autocast(side: Side):
    """`torch.autocast` around forward, behind steps in float32."""
    _, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 3 != 0):
            out = call(side.batch(i))
        side.backward(out.float().square().mean())
        optimizer.step()


@program("fsdp2", tolerance=2e-2)
def evaluated_then_autocast(side: Side):
    """Evaluation in float32, then training under `torch.autocast`."""
    _, call, optimizer = side.make(Net, sharded())
    with torch.no_grad():
        call(side.batch(0))
    for i in side.steps():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(side.batch(i))
        side.backward(out.float().square().mean())
        optimizer.step()


@program("fsdp2")
def set_to_zero(side: Side):
    """`zero_grad(set_to_none=False)`."""
    _, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad(set_to_none=False)
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2")
def clipped(side: Side):
    """`clip_grad_norm_` between backward and step."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        call(side.batch(i)).square().mean().backward()
        side.keep(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor())
        optimizer.step()


@program("fsdp2")
def frozen_parameters(side: Side):
    """Parameters that need no gradient."""

    def net():
        model = Net()
        model.blocks[0].up.requires_grad_(False)
        return model

    train(side, net, sharded())


@program("fsdp2")
def unfrozen_later(side: Side):
    """Parameters that need a gradient after some steps."""

    def net():
        model = Net()
        model.blocks[0].up.requires_grad_(False)
        return model

    model, call, optimizer = side.make(net, sharded())
    for i in side.steps():
        if i == 3:
            model.blocks[0].up.requires_grad_(True)
            optimizer = side.optimizer(model.parameters())
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2")
def ignored_parameters(side: Side):
    """`ignored_params`: replicas, whose gradients are this rank's own."""

    def wrap(model):
        mesh = line()
        return fully_shard(model, mesh=mesh, ignored_params={model.head.weight})

    train(side, Net, wrap)


@program("fsdp2")
def gathered_and_freed_by_hand(side: Side):
    """`unshard()` and `reshard()` between steps."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        if i % 2:
            model.unshard()
        side.backward(call(side.batch(i)).square().mean())
        model.reshard()
        optimizer.step()


@program("fsdp2")
def state_dict_loaded(side: Side):
    """A state that is saved and loaded again between steps."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        if i == 2:
            saved = {name: value.clone() for name, value in model.state_dict().items()}
        if i == 4:
            model.load_state_dict(saved)
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


@program("fsdp2")
def reshard_set_later(side: Side):
    """`set_reshard_after_forward` after some steps."""
    model, call, optimizer = side.make(Net, sharded())
    for i in side.steps():
        model.set_reshard_after_forward(i < 3)
        optimizer.zero_grad()
        side.backward(call(side.batch(i)).square().mean())
        optimizer.step()


class Recomputed(Net):
    def features(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


# A compiled block in a checkpoint may be recomputed by another of its graphs, which torch refuses.
@program("fsdp2", blocks=False)
def recomputed(side: Side):
    """Blocks in `torch.utils.checkpoint`."""
    train(side, Recomputed, sharded())


@program("fsdp2")
def tied_weights(side: Side):
    """One parameter in two modules."""

    class Tied(Net):
        def __init__(self):
            super().__init__(out=WIDTH)
            self.again = nn.Linear(WIDTH, WIDTH, bias=False)
            self.again.weight = self.head.weight

        def forward(self, x):
            return self.again(super().forward(x))

    train(side, Tied, sharded())


@program("fsdp2")
def unused_by_step(side: Side):
    """A block that only some steps use keeps `.grad` None in the others."""

    class Skips(Net):
        def forward(self, x, skip=False):
            if not skip:
                x = self.blocks[0](x)
            return self.head(self.blocks[1](x))

    _, call, optimizer = side.make(Skips, sharded())
    for i in side.steps():
        optimizer.zero_grad()
        side.backward(call(side.batch(i), i % 2 == 1).square().mean())
        optimizer.step()


@program("fsdp2", eager="CPUOffloadPolicy", fewer=False, blocks=False)
def offloaded(side: Side):
    """`CPUOffloadPolicy`."""
    train(side, Net, sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)))


@program("fsdp2", eager="set_all_reduce_hook", fewer=False)
def all_reduce_hook(side: Side):
    """`set_all_reduce_hook`."""

    def wrap(model):
        model = sharded()(model)
        model.set_all_reduce_hook(lambda output: output.mul_(0.5))
        return model

    train(side, Net, wrap)


@program("fsdp2", eager="torch._dynamo.graph_break()", fewer=False)
def graph_break_inside(side: Side):
    """A graph break in the forward: FSDP2 runs in eager mode around the pieces."""

    class Breaks(Net):
        def forward(self, x):
            h = self.features(x)
            torch._dynamo.graph_break()
            return self.head(h)

    train(side, Breaks, sharded())
