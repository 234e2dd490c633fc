"""One rank of ``test_programs.py``: programs as users write them, eager and compiled.

Each entry of ``PROGRAMS`` takes this rank and the number of ranks and returns a function and its
inputs. A case is ``program:backend``, or ``program:graphs`` for what AOTAutograd hands a backend.
What each did is written to ``<rank>.json`` in the folder of the first argument.
"""

import datetime
import json
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.tensor import DTensor

import dynamo_dist
from dynamo_dist.numerics.comparison import launches_counted
from inductor_passes.testing import leave_process

CALLS = 2  # the second call runs what the first compiled
WIDTH = 12


def local(rank, *shape, grad=True):
    """A tensor of which every rank has its own; double, so that only mistakes show."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(*shape, generator=generator, dtype=torch.double).div(4).requires_grad_(grad)


class ColumnLinear(torch.autograd.Function):
    """x [tokens, in] and this rank's rows of the weight [out / n, in] to [tokens, out / n].

    The gradient of x is summed over the ranks while the one of the weight is computed.
    """

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_x = grad @ weight
        work = dist.all_reduce(grad_x, group=ctx.group, async_op=True)
        grad_weight = grad.t() @ x
        work.wait()
        return grad_x, grad_weight, None


class RowLinear(torch.autograd.Function):
    """x [tokens, in / n] and this rank's columns of the weight [out, in / n] to [tokens, out]."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.save_for_backward(x, weight)
        out = x @ weight.t()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x, None


def megatron_mlp(rank, size):
    """Two layers, tensor-parallel over a group of the program's own."""
    group = dist.new_group(list(range(size)))

    def run(x, up, down):
        for _ in range(2):
            x = x + RowLinear.apply(F.gelu(ColumnLinear.apply(x, up, group)), down, group)
        return x.square().mean()

    x = local(-1, 8, WIDTH)
    return run, [x, local(rank, 2 * WIDTH, WIDTH), local(rank, WIDTH, 2 * WIDTH)]


def shift(tensor, rank, size):
    """Start the exchange of one ring step; returns its works and what the previous rank sends."""
    incoming = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, (rank + 1) % size),
            dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
        ]
    )
    return works, incoming


class RingMatmul(torch.autograd.Function):
    """All ranks' rows of x times this rank's columns of the weight, a block for each ring step.

    x [tokens / n, in] and weight [in, out / n] give [tokens, out / n]. The next block travels while
    one is multiplied; in the backward the sums of the gradient travel.
    """

    @staticmethod
    def forward(ctx, x, weight):
        rank, size = dist.get_rank(), dist.get_world_size()
        blocks, outs = [x] * size, [x] * size
        for step in range(size):
            last = step == size - 1
            if not last:
                works, incoming = shift(x, rank, size)
            owner = (rank - step) % size
            blocks[owner], outs[owner] = x, x @ weight
            if not last:
                for work in works:
                    work.wait()
                x = incoming
        ctx.save_for_backward(weight, *blocks)
        return torch.cat(outs)

    @staticmethod
    def backward(ctx, grad):
        rank, size = dist.get_rank(), dist.get_world_size()
        weight, *blocks = ctx.saved_tensors
        grads = grad.chunk(size)
        grad_weight = torch.zeros_like(weight)
        grad_x = grads[(rank - 1) % size] @ weight.t()
        for step in range(size):
            last = step == size - 1
            if not last:
                works, incoming = shift(grad_x, rank, size)
            grad_weight = grad_weight + blocks[step].t() @ grads[step]
            if not last:
                for work in works:
                    work.wait()
                grad_x = incoming + grads[(rank - step - 2) % size] @ weight.t()
        return grad_x, grad_weight


def ring_exchange(rank, size):
    """A matmul whose gathered input goes round a ring."""

    def run(x, weight):
        return torch.tanh(RingMatmul.apply(x, weight)).square().sum()

    return run, [local(rank, 4, WIDTH), local(rank + size, WIDTH, 5)]


class SendOn(torch.autograd.Function):
    """Send activations to the next stage, receive their gradient from it; returns a zero."""

    @staticmethod
    def forward(ctx, x, to, tag):
        ctx.to, ctx.tag = to, tag
        ctx.like = x.shape
        dist.send(x.contiguous(), to, tag=tag)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        grad_x = grad.new_empty(ctx.like)
        dist.recv(grad_x, ctx.to, tag=ctx.tag)
        return grad_x, None, None


class ReceiveFrom(torch.autograd.Function):
    """Receive activations [batch, width] from the stage before, send it their gradient."""

    @staticmethod
    def forward(ctx, anchor, batch, source, tag):
        ctx.source, ctx.tag = source, tag
        x = anchor.new_empty(batch, WIDTH)
        dist.recv(x, source, tag=tag)
        return x

    @staticmethod
    def backward(ctx, grad):
        dist.send(grad.contiguous(), ctx.source, tag=ctx.tag)
        return grad.new_zeros(()), None, None, None


def pipeline(rank, size):
    """A stage on each rank, two micro-batches, the loss on the last."""

    def run(x, weight, anchor):
        total = anchor * 0
        for number, piece in enumerate(x.chunk(2)):
            if dist.get_rank() > 0:
                piece = ReceiveFrom.apply(anchor, len(piece), rank - 1, number)
            piece = torch.relu(piece @ weight)
            if dist.get_rank() < dist.get_world_size() - 1:
                total = total + SendOn.apply(piece, rank + 1, number)
            else:
                total = total + piece.square().mean()
        return total

    anchor = torch.ones((), dtype=torch.double, requires_grad=True)
    return run, [local(-1, 8, WIDTH, grad=False), local(rank, WIDTH, WIDTH), anchor]


class SwapShards(torch.autograd.Function):
    """All-to-all that splits dimension ``scatter`` over the ranks and joins dimension
    ``gather``.
    """

    @staticmethod
    def forward(ctx, x, scatter, gather):
        ctx.dims = scatter, gather
        size = dist.get_world_size()
        sent = torch.stack(x.chunk(size, scatter)).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        return torch.cat(received.unbind(), gather)

    @staticmethod
    def backward(ctx, grad):
        scatter, gather = ctx.dims
        return SwapShards.apply(grad, gather, scatter), None, None


def ulysses_attention(rank, size):
    """Attention of a sequence in shards: whole sequences of some heads, then shards again."""
    heads, wide = 2 * size, 4

    def run(x, qkv, out):
        batch, part, _ = x.shape
        q, k, v = (x @ qkv).view(batch, part, 3, heads, wide).permute(2, 0, 3, 1, 4).unbind()
        q, k, v = (SwapShards.apply(t, 1, 2) for t in (q, k, v))
        attended = SwapShards.apply(F.scaled_dot_product_attention(q, k, v, is_causal=True), 2, 1)
        return attended.transpose(1, 2).reshape(batch, part, heads * wide) @ out

    full = heads * wide
    return run, [local(rank, 2, 4, WIDTH), local(-1, WIDTH, 3 * full), local(-2, full, WIDTH)]


class VocabularyCrossEntropy(torch.autograd.Function):
    """Loss of each token [tokens] from this rank's logits [tokens, vocabulary / n]."""

    @staticmethod
    def forward(ctx, logits, target, first):
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX)
        logits = logits - highest.unsqueeze(-1)
        outside = (target < first) | (target >= first + logits.shape[-1])
        index = (target - first).masked_fill(outside, 0)
        picked = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        dist.all_reduce(picked)
        exp = logits.exp()
        total = exp.sum(dim=-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exp / total.unsqueeze(-1), index, outside)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad):
        softmax, index, outside = ctx.saved_tensors
        ours = (~outside).to(grad.dtype).unsqueeze(-1)
        return softmax.scatter_add(-1, index.unsqueeze(-1), -ours) * grad.unsqueeze(-1), None, None


def vocabulary_cross_entropy(rank, size):
    """The last layer and the loss, the vocabulary in shards."""
    shard = 7

    def run(x, weight, target):
        logits = ColumnLinear.apply(x, weight, None)
        return VocabularyCrossEntropy.apply(logits, target, rank * shard).mean()

    target = torch.randint(size * shard, (9,), generator=torch.Generator().manual_seed(0))
    return run, [local(-1, 9, WIDTH), local(rank, shard, WIDTH), target]


def transformer(kind):
    """A small model of transformers, loaded with ``tp_plan="auto"``: a function for PROGRAMS."""

    def program(rank, size):
        import transformers

        folder = os.path.join(sys.argv[1], kind)
        sizes = {
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "use_cache": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        if kind == "Mixtral":
            sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
        if kind == "Qwen3":
            sizes |= {"head_dim": 8}
        model_class = getattr(transformers, f"{kind}ForCausalLM")
        if rank == 0:
            torch.manual_seed(0)
            model_class(getattr(transformers, f"{kind}Config")(**sizes)).save_pretrained(folder)
        dist.barrier()
        model = model_class.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).train()
        assert any(isinstance(p, DTensor) for p in model.parameters())
        tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))

        class Loss(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, tokens):
                return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss

        return Loss(), [tokens]

    return program


PROGRAMS = {
    "megatron_mlp": megatron_mlp,
    "ring_exchange": ring_exchange,
    "pipeline": pipeline,
    "ulysses_attention": ulysses_attention,
    "vocabulary_cross_entropy": vocabulary_cross_entropy,
    "llama": transformer("Llama"),
    "qwen3": transformer("Qwen3"),
    "mixtral": transformer("Mixtral"),
}


def step(run, leaves, inputs):
    """Output and the leaves' gradients of one forward and backward, as plain tensors."""
    for leaf in leaves:
        leaf.grad = None
    out = run(*inputs)
    out.square().sum().backward()
    results = [out.detach(), *(leaf.grad for leaf in leaves)]
    return [t.to_local() if isinstance(t, DTensor) else t for t in results]


def check(program, backend):
    """Compiled equals eager on this rank, in one graph, with as many launches of each kind."""
    run, inputs = program(dist.get_rank(), dist.get_world_size())
    leaves = [t for t in inputs if t.requires_grad]
    if isinstance(run, nn.Module):
        leaves += list(run.parameters())
    with launches_counted() as launched_in_eager:
        expected = step(run, leaves, inputs)
    assert launched_in_eager
    assert any(grad.abs().sum() > 0 for grad in expected[1:])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    for _ in range(CALLS):
        torch.testing.assert_close(step(compiled, leaves, inputs), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    with launches_counted() as launched:
        step(compiled, leaves, inputs)
    assert launched == launched_in_eager, (launched, launched_in_eager)


def graphs_in_words(program):
    """Matmuls, launches and waits of the forward's graph, then of the backward's, in their
    order.
    """
    words = []

    def read(graph_module, inputs):
        for node in graph_module.graph.nodes:
            name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
            if name in ("mm", "wait_tensor", "all_reduce", "isend", "irecv"):
                words.append(name)
        words.append("end")
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    run, inputs = program(dist.get_rank(), dist.get_world_size())
    backend = aot_autograd(fw_compiler=read, bw_compiler=read)
    torch.compile(run, backend=backend, fullgraph=True)(*inputs).backward()
    return words


def main():
    out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    dynamo_dist.enable()
    rank, results = dist.get_rank(), {}
    for case in cases:
        name, backend = case.split(":")
        start = time.perf_counter()
        try:
            if backend == "graphs":
                results[case] = graphs_in_words(PROGRAMS[name])
            else:
                check(PROGRAMS[name], backend)
                results[case] = "ok"
        except Exception:
            results[case] = traceback.format_exc()
        with open(f"{out}/{rank}.json", "w") as file:
            json.dump(results, file)
        print(f"{time.perf_counter() - start:.1f} s {case} {results[case]}", file=sys.stderr)
        dist.barrier()
    leave_process()


if __name__ == "__main__":
    main()
