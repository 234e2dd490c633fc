"""Question: what does a block communicate if only its weights are placed: upstream, by hand,
planned?

    python tools/bench/plan.py --out tools/bench/results/plan.json

An 8B-shaped decoder block (width 4096, 32 heads, hidden 14336, batch 8, 2048 tokens, bfloat16),
forward and backward, traced on a fake group of eight ranks. Baselines: upstream's choice op by op,
and the same block with Megatron's redistributes written by hand. Times are **modelled**, by torch's
own formula for redistributes (6.6 us and 0.6 us a hop to start, 87.7 GiB/s), of the collectives in
the graphs that Inductor would get; the planner is given the same prices. Seconds are processor
time. ``model_*`` are the planner's own sums of communication, in which equal redistributes of a
tensor count each.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

import dynamo_dist
from dynamo_dist.planning import repair
from dynamo_dist.planning.planner import plan, record
from dynamo_dist.testing import fake_mesh
from inductor_passes.graph.collectives import group_size, is_launch, kind, payload_bytes
from inductor_passes.inductor.graph_module import Captured, capturing

WIDTH, HEADS, HIDDEN, BATCH, TOKENS = 4096, 32, 14336, 8, 2048
COLUMN, ROW = ("q", "k", "v", "gate", "up"), ("o", "down")
PEAK_FLOPS, MEMORY_BYTES = 989e6 * 0.7, 3.35e6 * 0.7  # of an H100, a microsecond


class UpstreamPrices:
    """torch's formula for the cost of a redistribute on eight GPUs of a host."""

    def collective_us(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        n, gib = len(ranks), payload_bytes / 2**30
        if kind == "all_gather":
            return 6.6 + 0.6 * (n - 1) + gib * (n - 1) / 87.7 * 1e6
        if kind == "all_reduce":
            return 6.6 + 1.2 * (n - 1) + 2 * gib * (n - 1) / n / 87.7 * 1e6
        return 6.6 + 0.6 * (n - 1) + gib * (n - 1) / n / 87.7 * 1e6

    def product_us(self, dtype: str, shape: tuple[int, int, int, int], moved_bytes: float) -> float:
        return self.kernel_us(moved_bytes, 2.0 * math.prod(shape))

    def kernel_us(
        self, moved_bytes: float, operations: float = 0.0, *_: object, **__: object
    ) -> float:
        return max(operations / PEAK_FLOPS, self.memory_us(moved_bytes))

    def memory_us(self, moved_bytes: float) -> float:
        return moved_bytes / MEMORY_BYTES

    def digest(self) -> str:
        return "torch's redistribute cost"


class Norm(nn.Module):
    """RMS norm, written out in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class Block(nn.Module):
    """A decoder block; ``hand`` are the placements between its halves where redistributes are
    written.
    """

    def __init__(self, hand: list[Placement] | None, whole: list[Placement]) -> None:
        super().__init__()
        self.hand, self.whole = hand, whole
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm_1, self.norm_2 = Norm(), Norm()

    def _to(self, x: torch.Tensor, placements: list[Placement] | None) -> torch.Tensor:
        return x if self.hand is None else x.redistribute(placements=placements)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        h = self._to(self.norm_1(x), self.whole)
        q, k, v = (
            m(h).view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1) @ v
        x = x + self._to(self.o(a.transpose(1, 2).reshape(b, t, WIDTH)), self.hand)
        h = self._to(self.norm_2(x), self.whole)
        return x + self._to(self.down(F.silu(self.gate(h)) * self.up(h)), self.hand)


def all_to_all_as_on_gpus() -> None:
    """Let a CPU mesh change the sharded dimension by an all_to_all, which torch does on GPUs
    alone.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, placement_types

    def by_all_to_all(local: torch.Tensor, gather: int, shard: int, mesh: Any, dim: int) -> Any:
        name = mesh.get_group(dim).group_name
        return torch.ops._dtensor.shard_dim_alltoall(local, gather, shard, name)

    for module in (_collective_utils, _redistribute, placement_types):
        if hasattr(module, "shard_dim_alltoall"):
            module.shard_dim_alltoall = by_all_to_all


def modelled_us(graphs: list[Captured]) -> tuple[float, dict[str, int]]:
    """Time and number of the collectives of all graphs."""
    prices, total, counts = UpstreamPrices(), 0.0, dict[str, int]()
    for captured in graphs:
        for node in captured.graph.nodes:
            name = _kind(node)
            if name:
                size = group_size(node)
                total += prices.collective_us(name, payload_bytes(node), range(size))
                counts[name] = counts.get(name, 0) + 1
    return total, counts


def _kind(node: fx.Node) -> str:
    if is_launch(node):
        return kind(node)
    blocking = node.op == "call_function" and "shard_dim_alltoall" in str(node.target)
    return "all_to_all" if blocking else ""


def communication(
    mesh: DeviceMesh,
    layers: int,
    x_placement: Placement,
    how: str,
    backend_of: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> tuple[float, dict[str, int]]:
    """Time and number of collectives of one training step of ``layers`` blocks; ``how`` is
    ``upstream``, ``hand`` or ``planned``.
    """
    torch.compiler.reset()
    with capturing() as (inner, graphs):
        leading: list[Placement] = [Replicate()] * (mesh.ndim - 1)
        batch: list[Placement] = [Shard(0)] * (mesh.ndim - 1)
        hand = [*batch, x_placement] if how == "hand" else None
        with torch.device("meta"):
            model = nn.Sequential(*(Block(hand, [*batch, Replicate()]) for _ in range(layers)))
        for path, parameter in list(model.to(torch.bfloat16).named_parameters()):
            name, owner = path.split(".")[1], path.rpartition(".")[0]
            at = Shard(0) if name in COLUMN else Shard(1) if name in ROW else Replicate()
            shape = list(parameter.shape)
            if isinstance(at, Shard):
                shape[at.dim] //= mesh.size(-1)
            shard = torch.empty(shape, dtype=parameter.dtype)  # never touched, so no memory
            spread = DTensor.from_local(shard, mesh, [*leading, at], run_check=False)
            model.get_submodule(owner)._parameters["weight"] = nn.Parameter(spread)
        x = torch.empty(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16)
        placed = distribute_tensor(x, mesh, [*batch, x_placement], src_data_rank=None)

        def step(x: torch.Tensor) -> torch.Tensor:
            out = model(x)  # by hand it lies there already
            return out if how == "hand" else out.redistribute(placements=[*batch, x_placement])

        torch.compile(step, backend=backend_of(inner), fullgraph=True)(placed.requires_grad_())
        return modelled_us(graphs)


def planning(seconds: dict[str, float], inner: Callable[..., Any]) -> Callable[..., Any]:
    """A backend that plans, and says how long that took, from nothing and from the cache."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        start = time.process_time()
        recorded = record(gm, inputs)
        seconds["record_s"] = time.process_time() - start
        start = time.process_time()
        made = plan(recorded.program, recorded.schemas, recorded.meshes, UpstreamPrices())
        seconds["solve_s"] = time.process_time() - start
        seconds["operations"], seconds["gap_percent"] = len(made.choices), 100 * made.gap
        seconds["model_upstream_ms"] = made.upstream_us[0] / 1e3
        seconds["model_planned_ms"] = made.planned_us[0] / 1e3
        with tempfile.NamedTemporaryFile(suffix=".json") as kept:
            name = repair.fingerprint(gm, inputs)
            repair.file.save_plan(kept.name, {name: repair.file.StoredPlan.of(made)})
            start = time.process_time()
            repair.find_plan(gm, inputs, name, UpstreamPrices(), "", kept.name)
            seconds["cached_s"] = time.process_time() - start
            return repair.compile_repaired(gm, inputs, inner, UpstreamPrices(), "", kept.name)

    return backend


def _as_is(inner: Callable[..., Any]) -> Callable[..., Any]:
    return inner


def main() -> None:
    """Trace, plan, price, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument(
        "--mesh", default="8", help="for example 8 or 4x2; the last dimension is tp"
    )
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    all_to_all_as_on_gpus()
    shape = tuple(int(size) for size in options.mesh.split("x"))
    rows = []
    with fake_mesh(*shape) as mesh:
        for label, x_placement in (("replicated", Replicate()), ("sharded on sequence", Shard(1))):
            row: dict[str, Any] = {"input": label}
            for how in ("upstream", "hand", "planned"):
                seconds: dict[str, float] = {}
                backend_of = functools.partial(planning, seconds) if how == "planned" else _as_is
                # The planner works where the plugin is on; the others are what torch does by
                # itself.
                with dynamo_dist.enabled() if how == "planned" else contextlib.nullcontext():
                    us, counts = communication(mesh, options.layers, x_placement, how, backend_of)
                row[how] = {key: round(value, 3) for key, value in seconds.items()}
                row[how] |= {"communication_ms": round(us / 1e3, 2), "collectives": counts}
                print(label, how, row[how], flush=True)
            rows.append(row)
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": " ".join(["python", "tools/bench/plan.py", *sys.argv[1:]]),
            "torch": torch.__version__,
            "ranks": math.prod(shape),
            "rows": rows,
        }
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
