"""What programs do with a model that FSDP2 shards, in the forward and around it."""

import nets
import torch
import torch.nn.functional as F
from accumulation_programs import sync_last
from beside_eager import MIXED, adamw, batch, line, micro_batches, plain, program, train
from fsdp2_programs import sharded
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint


@program(2, sweep=True)
def another_method_as_forward():
    class Encoder(nets.Net):
        def encode(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x) * 2

    def wrap(model):
        model = sharded()(model)
        register_fsdp_forward_method(model, "encode")
        return model

    train(wrap, Encoder, calls=lambda model: model.encode, mixed=MIXED)


@program(2)
def blocks_called_twice():
    class Twice(nets.Net):
        def forward(self, x):
            for block in [*self.blocks, *self.blocks]:
                x = block(x)
            return self.head(x)

    train(sharded(), Twice, unequal=True, mixed=MIXED)


@program(2, sweep=True)
def a_loss_of_two_forwards():
    def calls(model):
        return lambda x: model(x) - model(x.flip(0)).square()

    train(sharded(), calls=calls, dtype=torch.float64)


@program(2)
def a_loss_that_reads_what_the_forward_reads():
    """A root's parameters stay unsharded until backward; in the third step the loss alone has a
    gradient.
    """

    def step(side, x, i):
        side.optimizer.zero_grad()
        out = side.call(x)
        weight = side.model.head.weight
        loss = (out.detach() if i == 2 else out).square().mean() + weight.pow(3).mean()
        loss.backward()
        if side.model.head.weight.grad is not None:
            side.optimizer.step()
        return loss

    train(sharded(), step=step, unequal=True, mixed=(3,))


@program(2, sweep=True)
def nested_blocks():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = nets.Block(), nn.Linear(nets.WIDTH, nets.WIDTH, bias=False)

        def forward(self, x):
            return self.out(self.inner(x))

    def wrap(model):
        fully_shard(model.blocks[0].inner, mesh=line())
        return sharded()(model)

    train(wrap, lambda: nets.Net(Outer), optimizer=adamw, unequal=True)


@program(2, sweep=True)
def skipped_blocks():
    class Skips(nets.Net):
        skipped = False

        def forward(self, x):
            x = self.blocks[0](x)
            if not self.skipped:
                x = self.blocks[1](x)
            return self.head(x)

    def step(side, x, i):
        side.model.skipped = i % 4 == 1
        return plain(side, x, i)

    train(sharded(), lambda: Skips(blocks=2), step=step, graphs=2, mixed=MIXED)


@program(2)
def recomputed_blocks():
    train(sharded(), nets.Recomputes, unequal=True, mixed=MIXED)


@program(2, sweep=True)
def recomputed_inside_blocks():
    class Recomputes(nets.Block):
        def forward(self, x):
            return x + checkpoint(lambda x: self.down(F.gelu(self.up(x))), x, use_reentrant=False)

    train(sharded(), lambda: nets.Net(Recomputes), optimizer=adamw)


@program(2, sweep=True)
def checkpoint_wrapper_inside():
    def wrap(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(block)
        return sharded()(model)

    train(wrap, mixed=MIXED)


@program(2, sweep=True)
def checkpoint_wrapper_outside():
    def wrap(model):
        for i, block in enumerate(model.blocks):
            model.blocks[i] = checkpoint_wrapper(fully_shard(block, mesh=line()))
        return fully_shard(model, mesh=line())

    train(wrap, unequal=True, dtype=torch.float64)


@program(2)
def compiled_in_place():
    def step(side, x, i):
        if side.is_compiled and i == 0:
            side.model.compile(backend="dynamo_dist", fullgraph=True)
            assert side.model.state_dict().keys() == nets.Net().state_dict().keys()
        side.call = side.model
        return plain(side, x, i)

    # The backend by its name runs here as traced, behind the passes.
    train(sharded(), step=step, dtype=torch.float64, merged=False)


@program(2, sweep=True)
def dropout_in_training_and_without():
    class Drops(nets.Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.3, self.training)

    def step(side, x, i):
        loss = plain(side, x, i)
        if i % 5 == 0:
            side.model.eval()
            with torch.no_grad():
                loss = loss + side.call(x).sum()
            side.model.train()
        return loss

    train(sharded(), lambda: nets.Net(Drops), step=step, graphs=2, unequal=True, mixed=(1, 5))


@program(2, sweep=True)
def recurrent():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(nets.WIDTH, 6, batch_first=True, bias=False)
            self.out = nn.Linear(6, 4, bias=False)

        def forward(self, x):
            return self.out(self.rnn(x[None])[0])

    def wrap(model):
        fully_shard(model.rnn, mesh=line())
        return fully_shard(model, mesh=line())

    with torch._dynamo.config.patch(allow_rnn=True):
        # Eager calls put other tensors in the list of weights that torch keeps, which upstream
        # guards.
        train(wrap, Recurrent, mixed=MIXED, graphs=2)


@program(2, sweep=True)
def lists_and_dictionaries_of_parameters():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList(torch.randn(8, 8) / 4 for _ in range(2))
            self.named = nn.ParameterDict({"scale": torch.ones(8)})

        def forward(self, x):
            for weight in self.list:
                x = torch.tanh(x @ weight)
            return x * self.named["scale"] + sum(p.square().sum() for p in self.parameters()) / 100

    train(lambda model: fully_shard(model, mesh=line()), Lists, unequal=True)


@program(2)
def lengths_that_change():
    def step(side, x, i):
        return plain(side, batch(i, rows=3 + i % 4), i)

    torch._dynamo.reset()  # and of which lengths were seen before
    with torch._dynamo.config.patch(automatic_dynamic_shapes=True):
        train(sharded(), step=step, graphs=2, mixed=(2,))


@program(2, sweep=True)
def whole_gradients_kept_gathered():
    train(
        sharded(reshard_after_forward=False),
        step=micro_batches(sync_last, "ece"),
        unequal=True,
        graphs=2,
    )
