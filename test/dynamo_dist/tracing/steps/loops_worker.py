"""Loops as users of transformers, accelerate and torchtitan write them, on two or four gloo ranks:
each step as one graph, beside eager mode.

Compared of each loop: losses, norms of gradients, parameters, learning rates, and how many graphs
were compiled. torchtitan's classes are written here again, as far as its ``train_step`` uses them.
"""

import contextlib
import copy
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from ranks_worker import local, synchronizing
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.testing import leave_process

STEPS, MICRO_BATCHES, BATCH, LENGTH, WORDS, WIDTH, IGNORED = 4, 2, 2, 16, 64, 32, -100
LOOPS = {2: {}, 4: {}}


def loop(ranks):
    """Register a function that makes ``(step, model, rate)`` for so many ranks."""

    def register(function):
        LOOPS[ranks][function.__name__] = function
        return function

    return register


def microbatches(number):
    """Yield the micro-batches of a step; ranks with the same ``number`` have the same."""
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(100 * number + step)
        found = []
        for _ in range(MICRO_BATCHES):
            words = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
            labels = words.clone()
            labels[:, : 3 + number] = IGNORED  # what a rank does not learn
            found.append({"input_ids": words, "labels": labels})
        yield found


# --- transformers and accelerate ------------------------------------------------------------------


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def by_hand(model):
    """The loop that one writes after reading ``Trainer``'s."""
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, STEPS)

    def step(batches):
        total = torch.zeros(())
        for i, batch in enumerate(batches):
            with synchronizing(model, i == MICRO_BATCHES - 1):
                loss = model(**batch).loss / MICRO_BATCHES
                loss.backward()
            total = total + loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return total, norm.full_tensor() if isinstance(norm, DTensor) else norm

    return step, model, optimizer


@loop(2)
def by_hand_ddp():
    return by_hand(DistributedDataParallel(llama()))


@loop(2)
def by_hand_fsdp2():
    model = llama()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return by_hand(fully_shard(model, mesh=mesh))


def with_accelerate(accelerator, accumulates=False):
    from transformers import get_cosine_schedule_with_warmup

    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 1, STEPS)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def whole(batches):
        losses = []
        for i, batch in enumerate(batches):
            is_last = i == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
            losses.append(loss.detach())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return losses, norm

    def broken(batches):
        """Dynamo traces no ``ExitStack.enter_context``, with which ``accumulate`` begins."""
        losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        return losses, norm

    return broken if accumulates else whole, model, optimizer


@loop(2)
def accelerate_ddp():
    return with_accelerate(accelerator())


@loop(2)
def accelerate_accumulate():
    return with_accelerate(accelerator(), accumulates=True)


@loop(2)
def accelerate_fsdp2():
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    return with_accelerate(accelerator(fsdp_plugin=plugin))


def accelerator(**kwargs):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES, **kwargs)


# --- torchtitan -----------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4
        for name in ("wq", "wk", "wv", "wo"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def forward(self, x, turns):
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, WIDTH // self.heads) for w in (self.wq, self.wk, self.wv)
        )
        q, k = turned(q, turns), turned(k, turns)
        out = F.scaled_dot_product_attention(
            *(each.transpose(1, 2) for each in (q, k, v)), is_causal=True
        )
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


def turned(x, turns):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(3).type_as(x)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x, turns):
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({f"{i}": TransformerBlock() for i in range(2)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS, bias=False)
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** -torch.arange(0, 1, 0.25))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), False)

    def forward(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def apply_tp(model, mesh):
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def apply_fsdp(model, mesh):
    fully_shard(model.tok_embeddings, mesh=mesh)
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard([model.norm, model.output], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    for module in (model, model.tok_embeddings, *model.layers.values(), model.norm):
        module.set_gradient_divide_factor(1.0)  # the loss is divided by tokens of all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


class OptimizersContainer(torch.optim.Optimizer):
    """The optimizers of the model's parts, as one."""

    def __init__(self, model_parts, **kwargs):
        self.optimizers, params = [], []
        for model in model_parts:
            own = [p for p in model.parameters() if p.requires_grad]
            self.optimizers.append(torch.optim.AdamW(own, **kwargs))
            params += own
        # As there, so that hooks of optimizers can be registered.
        super().__init__(params, kwargs)

    def __iter__(self):
        return iter(self.optimizers)

    def step(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in self.optimizers:
            optimizer.zero_grad(*args, **kwargs)


class LRSchedulersContainer:
    def __init__(self, optimizers):
        self.schedulers = [LambdaLR(each, warm_up_then_decay) for each in optimizers]

    def step(self):
        for scheduler in self.schedulers:
            scheduler.step()


def warm_up_then_decay(step):
    return (step + 1) / 2 if step < 2 else 1 - (step - 2) / STEPS


def dist_sum(x, mesh):
    return funcol.all_reduce(x, reduceOp="sum", group=mesh).item()


@torch.no_grad()
def clip_grad_norm_(parameters, max_norm, foreach=None):
    grads = [p.grad for p in parameters if p.grad is not None]
    total_norm = nn.utils.get_total_norm(grads, 2.0, False, foreach)
    if isinstance(total_norm, DTensor):
        total_norm = total_norm.full_tensor()
    nn.utils.clip_grads_with_norm_(parameters, max_norm, total_norm, foreach)
    return total_norm


def cross_entropy_loss(pred, labels):
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


class Trainer:
    """What torchtitan's has of a step."""

    def __init__(self, model, mesh, **kwargs):
        self.model_parts, self.batch_mesh = [model], mesh
        self.optimizers = OptimizersContainer(
            self.model_parts, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **kwargs
        )
        self.lr_schedulers = LRSchedulersContainer(self.optimizers)
        self.loss_fn = cross_entropy_loss

    def forward_backward_step(self, input_dict, labels, global_valid_tokens):
        (model,) = self.model_parts
        pred = model(input_dict["input"])
        loss = self.loss_fn(pred, labels) / global_valid_tokens
        del pred
        loss.backward()
        return loss

    def train_step(self, data_iterator):
        self.optimizers.zero_grad()
        lr = self.lr_schedulers.schedulers[0].get_last_lr()[0]
        microbatches = []
        local_valid_tokens = torch.tensor(0, dtype=torch.int64)
        for _ in range(MICRO_BATCHES):
            input_dict, labels = next(data_iterator)
            local_valid_tokens += (labels != IGNORED).sum()
            microbatches.append((input_dict, labels))
        global_valid_tokens = dist_sum(local_valid_tokens, self.batch_mesh)
        accumulated_losses = []
        for input_dict, labels in microbatches:
            loss = self.forward_backward_step(input_dict, labels, global_valid_tokens)
            accumulated_losses.append(loss.detach())
        grad_norm = clip_grad_norm_(
            [p for m in self.model_parts for p in m.parameters()], 1.0, foreach=True
        )
        self.optimizers.step()
        self.lr_schedulers.step()
        loss = torch.sum(torch.stack(accumulated_losses))
        global_avg_loss = dist_sum(loss, self.batch_mesh)
        return global_avg_loss, grad_norm.item(), lr


def titan(model, mesh, **kwargs):
    trainer = Trainer(model, mesh, **kwargs)

    def step(batches):
        pairs = [({"input": each["input_ids"]}, each["labels"]) for each in batches]
        return trainer.train_step(iter(pairs))

    return step, model, trainer.optimizers.optimizers[0]


@loop(2)
def torchtitan_fsdp2():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Transformer()
    apply_fsdp(model, mesh)
    return titan(model, mesh, fused=True)


@loop(4)
def torchtitan_fsdp2_and_tp():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    torch.manual_seed(0)
    model = Transformer()
    apply_tp(model, mesh["tp"])
    apply_fsdp(model, mesh["fsdp"])
    return titan(model, mesh["fsdp"], fused=True)


# --------------------------------------------------------------------------------------------------


def run(make, batches, compiled):
    """Return what each step returns with the learning rate behind it, and the parameters."""
    step, model, optimizer = make()
    if compiled:
        whole = step.__name__ != "broken"
        step = torch.compile(step, backend="dynamo_dist", fullgraph=whole)
    found = []
    for each in batches:
        found.append((step(each), optimizer.param_groups[0]["lr"]))
    return found, [local(each.detach()) for each in model.parameters()]


def compare(make, number):
    batches = [*microbatches(number)]
    want, values = run(make, copy.deepcopy(batches), False)
    counters.clear()
    torch.compiler.reset()
    with graph_passes_only():
        found, ours = run(make, batches, True)
    # Compiled, Adam corrects its bias by a step in float32.
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(ours, values, rtol=2e-5, atol=2e-5)
    graphs = counters["stats"]["unique_graphs"]
    # A step that begins with zero_grad() finds gradients from the second call on.
    if "accumulate" not in make.__name__:
        assert graphs == (2 if "torchtitan" in make.__name__ else 1), graphs
    return f"{graphs} graphs"


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world, failed = dist.get_world_size(), []
    for name, make in LOOPS[world].items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        try:
            said = compare(make, dist.get_rank() // 2 if world == 4 else dist.get_rank())
        except BaseException:
            said = traceback.format_exc()
            failed.append(name)
        print(name, said, flush=True)
        dist.barrier()
    assert not failed, failed
    leave_process()


main()
