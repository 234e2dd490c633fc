#!/usr/bin/env python
"""Question: how long is a training step within a memory budget, beside what others would keep?

    python tools/bench/memory.py --json tools/bench/results/memory.json

Llama-3 8B and 70B (FSDP2 x TP on 8 x 8 ranks) and a routed mixture of experts (FSDP2 and expert
parallel), traced on a fake group with fake tensors; ``--layers`` of each. Budgets are shares of the
peak (inputs included) of the step that keeps everything. Times and peaks are **modelled**, on
h100x8 with a network of 25 GB/s a rank; all ways are scheduled by the same scheduler under the same
cap. Baselines are made anew after what their authors say:

- ``checkpoint``: ``reshard_after_forward=True``, each block checkpointed;
- ``min_cut``: upstream's partition at the largest ``activation_memory_budget`` that fits;
- ``unshard``, ``states_away``: DeepCompile's rules. Activations are kept as upstream's partition
  has it. Where that fits, gathered parameters stay gathered while they fit, the best for their
  bytes first. Where it does not, optimizer states wait on the host, as few as must; their copies
  are priced and placed as ours are.

``unmoved`` is ours where nothing may wait on the host, ``moved`` how many values and optimizer
states do otherwise. A way that does not fit a budget counts as
none.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.graph.collectives import is_launch
from inductor_passes.graph.phases import mark_phases
from inductor_passes.graph_pass import PassContext
from inductor_passes.inductor.session import CompileSession
from inductor_passes.memory.budget import OPTION
from inductor_passes.memory.keep_within_budget import KeepWithinBudget, input_bytes
from inductor_passes.memory.search import Retention, RetentionSearch, SearchSettings
from inductor_passes.rewrite.rematerialize import kept_by_partition
from inductor_passes.torch_compat.c10d import init_fake_group

TOPOLOGY = "h100x8"
CHUNKS = 8
SHARES = (1.0, 0.8, 0.6, 0.5)
BUDGETS = (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0)  # of activations, as upstream counts them


class Block(nn.Module):
    """A decoder block with grouped queries and a gated MLP."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.size, self.repeats = width // heads, heads // groups
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.mlp = Gated(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            each(y).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        k, v = (each.repeat_interleave(self.repeats, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Gated(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Routed experts of a fixed capacity, some on each rank of a group, and a shared one."""

    def __init__(self, width: int, hidden: int, count: int, chosen: int, group: Any) -> None:
        super().__init__()
        self.group, self.chosen = group, chosen
        self.router = nn.Linear(width, count, bias=False)
        here = count // group.size()
        self.gate, self.up = (nn.Parameter(torch.empty(here, width, hidden)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(here, hidden, width))
        self.shared = Gated(width, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed._functional_collectives as funcol

        rows = x.flatten(0, 1)
        share = self.router(rows).softmax(-1)
        capacity = rows.shape[0] * self.chosen // share.shape[-1]
        weight, taken = share.t().topk(capacity)  # each expert takes its best rows
        sent = rows[taken.flatten()]
        at = funcol.all_to_all_single_autograd(sent, None, None, self.group)
        at = at.unflatten(0, (self.group.size(), self.gate.shape[0], capacity)).transpose(0, 1)
        at = at.flatten(1, 2)
        gate, up, down = (each.to(x.dtype) for each in (self.gate, self.up, self.down))
        out = torch.bmm(F.silu(torch.bmm(at, gate)) * torch.bmm(at, up), down)
        out = out.unflatten(1, (self.group.size(), capacity)).transpose(0, 1).flatten(0, 2)
        back = funcol.all_to_all_single_autograd(out, None, None, self.group)
        mixed = torch.zeros_like(rows).index_add(
            0, taken.flatten(), back * weight.flatten()[:, None]
        )
        return mixed.view_as(x) + self.shared(x)


class Model(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self, blocks: list[nn.Module], width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        # The logits of a part of the rows at a time, as whoever is short of memory writes it.
        rows, wanted = self.norm(x).flatten(0, 1), tokens.flatten()
        parts = zip(rows.chunk(CHUNKS), wanted.chunk(CHUNKS), strict=True)
        # Read here, and not in a checkpoint, the head is gathered once.
        head = self.head.weight
        losses = [checkpoint(self.loss, *part, head, use_reentrant=False) for part in parts]
        return torch.stack(losses).mean()

    def loss(self, rows: torch.Tensor, wanted: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """The loss of some rows."""
        return F.cross_entropy(F.linear(rows, head).float(), wanted)


def llama(mesh: DeviceMesh, layers: int, width: int, heads: int, hidden: int) -> Model:
    """A Llama-3, tensor parallel in a node."""
    model = Model([Block(width, heads, 8, hidden) for _ in range(layers)], width, 128256)
    plan = dict.fromkeys(("q", "k", "v", "mlp.gate", "mlp.up"), ColwiseParallel())
    plan |= dict.fromkeys(("o", "mlp.down"), RowwiseParallel())
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)
    return model


def experts(mesh: DeviceMesh, layers: int) -> Model:
    """A mixture of 64 experts, 6 of them for each token."""
    blocks: list[nn.Module] = []
    for _ in range(layers):
        block = Block(2048, 16, 16, 1408)
        block.mlp = Experts(2048, 1408, 64, 6, mesh["dp"].get_group())
        blocks.append(block)
    return Model(blocks, 2048, 102400)


SHAPES = {"llama-3 8B": (8, 8), "llama-3 70B": (8, 8), "experts": (8, 1)}  # of dp and tp
MODELS: dict[str, Callable[[DeviceMesh, int], Model]] = {
    "llama-3 8B": lambda mesh, layers: llama(mesh, layers, 4096, 32, 14336),
    "llama-3 70B": lambda mesh, layers: llama(mesh, layers, 8192, 64, 28672),
    "experts": experts,
}


def captured(name: str, layers: int, rows: int) -> fx.GraphModule:
    """The graph of a training step, as it comes to be lowered."""
    found: list[fx.GraphModule] = []

    class Enough(Exception):
        pass

    def lower(session: CompileSession, gm: fx.GraphModule, *_: object, **__: object) -> None:
        found.append(gm)
        raise Enough

    torch.compiler.reset()  # or sizes that differ between models are symbols
    before = CompileSession.lower
    init_fake_group(math.prod(SHAPES[name]), 0)
    mesh = init_device_mesh("cpu", SHAPES[name], mesh_dim_names=("dp", "tp"))
    with torch.device("meta"):
        model = MODELS[name](mesh, layers)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    own = {p for m in model.modules() if isinstance(m, Experts) for p in (m.gate, m.up, m.down)}
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy, ignored_params=own)
    # Shapes alone: no rank holds what is trained.
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=False)
        tokens = torch.zeros(rows, 8192, dtype=torch.long)

        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        CompileSession.lower = lower  # type: ignore[assignment,method-assign]
        try:
            options = {"topology": TOPOLOGY}
            torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options)(tokens)
        except Exception:
            if not found:
                raise
        finally:
            CompileSession.lower = before  # type: ignore[method-assign]
            torch.distributed.destroy_process_group()
    (gm,) = found
    mark_phases(gm.graph)
    return gm


class Ways:
    """The ways of one graph: what each would keep within a budget, and how long the step is."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.graph = gm.graph
        self.cost = TopologyCostModel(load_topology(TOPOLOGY))
        self.search = RetentionSearch(
            self.graph, self.cost, sys.maxsize, may_move=True, may_release=True
        )
        self.inputs = input_bytes(self.graph)
        self.everything = self.search.choice(SearchSettings())
        self.kept_by_upstream = {budget: self._min_cut(budget) for budget in BUDGETS}
        self.gathers = self._gathers()

    def _min_cut(self, budget: float) -> list[set[fx.Node]]:
        with functorch_config.patch(activation_memory_budget=budget):
            return [set(kept_by_partition(each)) for each in self.search.borders]

    def checkpoint(self, limit: int) -> Retention:
        """Block inputs alone are kept."""
        kept = [
            {crossing.nodes[i] for alive in found[::2] for i in alive}
            for crossing, found in zip(self.search.crossings, self.search.junctions, strict=True)
        ]
        return self.search.keeping(kept)

    def min_cut(self, limit: int) -> Retention:
        """Upstream's partition with the largest budget of activations that fits."""
        choices = [self.search.keeping(kept) for kept in self.kept_by_upstream.values()]
        return next((each for each in choices if each.peak_bytes <= limit), choices[-1])

    def unshard(self, limit: int) -> Retention:
        """Upstream's activations; parameters stay gathered while they fit, by time for bytes."""
        kept = self.kept_by_upstream[1.0]
        best = self.search.keeping(kept)
        low, high = 0, len(self.gathers)
        while low < high:
            middle = (low + high + 1) // 2
            more = [
                {node for _, border, node in self.gathers[:middle] if border == number}
                for number in range(len(kept))
            ]
            tried = [nodes | others for nodes, others in zip(kept, more, strict=True)]
            if (choice := self.search.keeping(tried)).peak_bytes <= limit:
                best, low = choice, middle
            else:
                high = middle - 1
        return best

    def states_away(self, limit: int) -> Retention:
        """Upstream's activations; as few of the optimizer's states wait on the host as must."""
        for number in range(len(self.search.states) + 1):
            choice = self.search.keeping(self.kept_by_upstream[1.0], number)
            if choice.peak_bytes <= limit:
                break
        return choice

    def _gathers(self) -> list[tuple[float, int, fx.Node]]:
        """Gathered parameters that may stay, with their borders, the most time for bytes first."""
        found: list[tuple[float, int, fx.Node]] = []
        kept = self.kept_by_upstream[1.0]
        for number, (crossing, nodes) in enumerate(zip(self.search.crossings, kept, strict=True)):
            for i, node in enumerate(crossing.nodes):
                source = node.all_input_nodes[0] if node.all_input_nodes else None
                waits = source is not None and is_launch(source)
                size = crossing.values[i].bytes
                if waits and node not in nodes and size:
                    us = sum((crossing.values[crossing.nodes.index(source)].us or {}).values())
                    found.append((-us / size, number, node))
        return sorted(found, key=lambda each: each[0])

    def row(self, share: float) -> dict[str, Any]:
        """Time and peak of each way under a budget."""
        budget = int(share * (self.everything.peak_bytes + self.inputs))
        limit = budget - self.inputs
        # The reserve is for what the model does not see, and no baseline has one.
        context = PassContext(self.cost, extra={OPTION: budget})
        ours = KeepWithinBudget.build(context)
        self.search.limit_bytes = limit
        start = time.process_time()
        best = ours.fastest(self.graph, self.search)
        seconds = time.process_time() - start
        given = self.search.movable, self.search.states
        self.search.movable, self.search.states = [], []
        unmoved = ours.fastest(self.graph, self.search)
        self.search.movable, self.search.states = given
        bound = ours.bound_us(self.graph, self.search)
        row: dict[str, Any] = {
            "budget_gib": round(budget / 2**30, 1),
            "seconds": round(seconds, 1),
            "ours": {"ms": best.us / 1e3, "peak": best.peak_bytes / limit},
            "moved": [len(best.choice.moved), best.choice.states],
            "gap_to_bound": best.us / bound - 1,
            "unmoved": {"ms": unmoved.us / 1e3, "peak": unmoved.peak_bytes / limit},
        }
        others: list[float] = []
        for way in (self.checkpoint, self.min_cut, self.unshard, self.states_away):
            found = ours.scheduled(self.graph, self.search, way(limit), limit)
            fits = found.peak_bytes <= limit
            ms = found.us / 1e3
            row[way.__name__] = {"ms": ms, "peak": found.peak_bytes / limit} if fits else None
            others += [ms] * fits
        row["over_best"] = best.us / 1e3 / min(others) if others else None
        return row


def rounded(value: Any) -> Any:
    """Figures as they are read."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Print a line for each model and budget, and the geometric mean over the best baseline."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=tuple(MODELS))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=1, help="of 8192 tokens, of a rank")
    parser.add_argument("--json", type=Path, help="what it has of other models is kept")
    options = parser.parse_args()
    dynamo_dist.enable()
    rows: dict[str, Any] = {}
    if options.json and options.json.exists():
        rows = json.loads(options.json.read_text())["rows"]
    for name in options.models:
        ways = Ways(captured(name, options.layers, options.rows))
        for share in SHARES:
            row = rows[f"{name}, {share}"] = rounded(ways.row(share))
            print(name, share, json.dumps(row), flush=True)
        compared = [row for row in rows.values() if row["over_best"]]
        over = [row["over_best"] for row in compared]
        bound = [row["over_best"] / (1 + row["gap_to_bound"]) for row in compared]
        summary = {"over_best": round(geometric_mean(over), 3), "worst": max(over)}
        summary["bound_over_best"] = round(geometric_mean(bound), 3)
        what = f"modelled on {TOPOLOGY}, {options.layers} layers of each, 8192 tokens a row"
        result = {"torch": torch.__version__, "what": what, **summary, "rows": rows}
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
