"""One rank of ``test_split.py``: experts on four ranks, all tokens kept, exchanged in two parts,
beside eager mode.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed import init_device_mesh

from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

torch._dynamo.config.capture_scalar_outputs = True
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
group = mesh.get_group()
TOKENS, WIDTH, HIDDEN, TOP = 32, 16, 32, 2
EXPERTS = 2 * ranks
exchange = funcol.all_to_all_single_autograd


class Experts(nn.Module):
    """A dense layer whose hidden units are shared out, then each token's ``TOP`` experts,
    wherever they are.
    """

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Parameter(torch.randn(WIDTH, EXPERTS))
        dense = torch.randn(2, HIDDEN, WIDTH).chunk(ranks, 1)[rank]
        self.dense_up, self.dense_down = nn.Parameter(dense[0].t() / 4), nn.Parameter(dense[1] / 6)
        up, down = torch.randn(EXPERTS, WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
        self.up = nn.Parameter(up.chunk(ranks)[rank] / 4)
        self.down = nn.Parameter(down.chunk(ranks)[rank] / 6)

    def forward(self, x):
        # Tokens of all ranks through the dense layer, each rank a share of its units.
        every = funcol.all_gather_tensor_autograd(x, 0, group)
        dense = torch.relu(every @ self.dense_up) @ self.dense_down
        x = x + funcol.reduce_scatter_tensor_autograd(dense, "sum", 0, group)
        weights, chosen = (x @ self.router).softmax(-1).topk(TOP, -1)
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        here = nn.functional.one_hot(flat, EXPERTS).sum(0)
        there = funcol.wait_tensor(funcol.all_to_all_single(here, None, None, group))
        sends = here.view(ranks, -1).sum(1).tolist()
        gets = there.view(ranks, -1).sum(1).tolist()
        for size in (*sends, *gets):
            torch._check_is_size(size)
        came = exchange(x[order // TOP], gets, sends, group)
        own = torch.arange(EXPERTS).view(ranks, -1)[0].repeat(ranks)
        mine = own.repeat_interleave(there, output_size=came.shape[0])
        picked = torch.zeros_like(came)
        for e in range(EXPERTS // ranks):
            worked = torch.relu(came @ self.up[e]) @ self.down[e]
            picked = picked + worked * (mine == e)[:, None]
        back = exchange(picked, sends, gets, group)
        placed = torch.zeros_like(back).index_copy(0, order, back).view(TOKENS, TOP, WIDTH)
        return x + (weights[..., None] * placed).sum(1)


model = Experts()
torch.manual_seed(1 + rank)
wrong = []
records = []
unsubscribe = recorder.subscribe(records.append)
options = {"split": 2, "disable": ["merge_tiny"]}
compiled = torch.compile(model, backend="dynamo_dist", options=options)


def close(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-4)


def trained(run, x):
    """The result of one step, and the gradients of its input and of all weights."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


for step in range(3):
    x = torch.randn(TOKENS, WIDTH)
    with torch.no_grad():
        wrong += [] if close(compiled(x), model(x)) else [f"inference {step}"]
    pairs = zip(trained(compiled, x), trained(model, x), strict=True)
    wrong += [f"training {step}: value {i}" for i, pair in enumerate(pairs) if not close(*pair)]
# A rank to which nobody sends: every token goes to the experts of rank 0.
x = torch.ones(TOKENS, WIDTH)
pairs = zip(trained(compiled, x), trained(model, x), strict=True)
wrong += [f"one rank: value {i}" for i, pair in enumerate(pairs) if not close(*pair)]
unsubscribe()
launches = {r.phase: [c.kind for c in r.collectives].count("all_to_all") for r in records}
# Counts, tokens and results go in two parts each; their gradients too.
wanted = {"inference": 6, "forward": 6, "backward": 4}
wrong += [] if launches == wanted else [f"launches {launches}"]
wrong += [r.phase for r in records if r.order_kept is False]
ended = [f"{e.operator}: {e.reason}" for r in records if r.split is not None for e in r.split.ended]
verdicts = [None] * ranks
dist.all_gather_object(verdicts, wrong)
print(f"rank {rank}: {verdicts} {launches} {ended}", file=sys.stderr)
leave_process(any(verdicts))
