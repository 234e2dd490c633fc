"""Trace a large model on fake ranks: its graphs, our passes and the predicted timeline, no run.

Weights are sharded over ``tp`` ranks as transformers' own plan says, and each shard again over the
``dp`` ranks, by ``fully_shard``: gathered where the forward uses
it and kept for the backward, gradients reduce-scattered. Tensors have shapes and no storage, the process group answers and moves nothing,
and Inductor stops after its graph passes, before it would generate code.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from data import quiet_transformers
from progress import Progress
from rich.table import Table
from show import paths, wide_console
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import dynamo_dist
import inductor_passes
from dynamo_dist.reporting import Fact, collect
from dynamo_dist.reporting.write import write_report
from inductor_passes.records import GraphRecord
from inductor_passes.reporting.summary import totals
from inductor_passes.testing import fake_group

# Shapes as their makers publish them (config.json of the models).
MODELS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "llama3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_theta": 500000.0,
    },
    "llama-tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    },
}
DTYPE = torch.bfloat16


class Traced(Exception):
    """Both graphs are there: nothing is to be run."""


def run(args: argparse.Namespace) -> int:
    """Trace, run the passes, report; exit code 2 if the shape cannot be traced as asked."""
    start = time.monotonic()
    progress = Progress()
    try:
        problem = problem_with(args)
        if problem:
            print(f"error: {problem}", file=sys.stderr)
            return 2
        progress.phase(f"{args.model}: parameters without storage")
        with fake_group(world_size=args.world_size), collect() as collector:
            parameters = trace(args, progress)
            report = collector.report()
        breaks = sum(record.count for record in collector.breaks)
        results = summarise(args, collector.graphs, breaks, parameters)
        progress.phase("writing the report")
        fact = Fact("tracing and passes", time.monotonic() - start, "s", "measured, CPU")
        report = dataclasses.replace(report, facts=(*report.facts, fact))
        written = write_report(report, Path(args.out).resolve())
    finally:
        progress.close()
    results |= {
        **paths(written),
        "seconds": time.monotonic() - start,
        "cpu_seconds": time.process_time(),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show(results)
    return 0 if results["ok"] else 1


def problem_with(args: argparse.Namespace) -> str:
    """Why these arguments cannot be traced, or ""."""
    if args.model not in MODELS:
        return f"--model {args.model} is not known; there are {', '.join(MODELS)}."
    shape = MODELS[args.model]
    if args.tp < 1 or args.world_size % args.tp:
        return f"--world-size {args.world_size} is not a multiple of --tp {args.tp}."
    if shape["num_key_value_heads"] % args.tp:
        return f"{args.model} has {shape['num_key_value_heads']} key heads: --tp must divide that."
    return ""


def trace(args: argparse.Namespace, progress: Progress) -> int:
    """Compile forward and backward up to Inductor's graph passes; returns the parameter count."""
    from torch._functorch import config as functorch_config
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _meta_model(args)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mesh = init_device_mesh(
        "cpu", (args.world_size // args.tp, args.tp), mesh_dim_names=("dp", "tp")
    )
    # The backward is lowered with the forward, not at the first backward(): there will be none.
    at_once = functorch_config.patch(force_non_lazy_backward_lowering=True)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        _materialise(model)
        shard_over_tp(model, mesh["tp"])
    if mesh["dp"].size() > 1:  # joins meshes, whose ranks are no fake tensors
        shard_over_dp(model, mesh["dp"])
    with fake, dynamo_dist.enabled(), at_once:
        tokens = torch.zeros(1, args.seq, dtype=torch.long)
        torch.compiler.reset()
        progress.phase(f"{args.model}: tracing forward and backward, {args.seq} tokens a rank", 2)
        # Pinning is for code generation, which there will be none of.
        options = inductor_passes.options(topology=args.topology, disable=["pin_order"])
        backend = _backend(options, progress)
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        try:
            compiled(input_ids=tokens, labels=tokens, use_cache=False)
        except Traced:
            return parameters
    raise AssertionError("the traced graph was never called")


def _meta_model(args: argparse.Namespace) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODELS[args.model], max_position_embeddings=args.seq, use_cache=False)
    with quiet_transformers(), torch.device("meta"):
        return LlamaForCausalLM(config).to(DTYPE).train()


def _materialise(model: nn.Module) -> None:
    """From meta to fake tensors on the CPU, under the mode that is on."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    new = torch.empty(value.shape, dtype=value.dtype)
                    table[name] = nn.Parameter(new) if table is module._parameters else new


def shard_over_tp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Transformers' own plan for the model, as ``from_pretrained(..., tp_plan="auto")`` applies it."""
    from transformers.distributed import tensor_parallel

    plan = {f"model.{name}": style for name, style in model.config.base_model_tp_plan.items()}
    plan |= model._tp_plan
    styles = {}
    for name, module in model.named_modules():
        style = plan.get(re.sub(r"\d+", "*", name))
        if style is not None:
            styles[name] = style
            for parameter in list(module._parameters):
                tensor_parallel.ALL_PARALLEL_STYLES[style].shard_param(module, parameter, mesh)
    tensor_parallel.apply_tensor_parallelism(model, mesh, styles)


def shard_over_dp(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter by rows over the ranks that hold the same tp shard; whole from forward to backward."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)


def _backend(options: dict[str, Any], progress: Progress) -> Callable[..., Any]:
    """Inductor up to and with its post-grad passes, ours among them; what it returns cannot run."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    def no_code(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Callable:
        post_grad_passes(gm, bool(kwargs.get("is_inference")))
        progress.advance()

        def boxed(args: list[Any]) -> NoReturn:
            raise Traced

        boxed._boxed_call = True
        return boxed

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return compile_fx(gm, inputs, inner_compile=no_code, config_patches=options)

    return backend


def summarise(
    args: argparse.Namespace, graphs: Sequence[GraphRecord], breaks: int, parameters: int
) -> dict[str, Any]:
    """The object that ``--json`` prints; exposed times in microseconds, simulated on ``topology``."""
    assert graphs, "a sharded model has collectives"
    predicted = totals(graphs)
    payload: Counter[str] = Counter()
    for graph in graphs:
        for collective in graph.collectives:
            payload[collective.kind] += collective.payload_bytes
    return {
        "ok": breaks == 0 and {graph.phase for graph in graphs} == {"forward", "backward"},
        "label": "traced on fake ranks, simulated, nothing was run",
        "model": args.model,
        "parameters": parameters,
        "world_size": args.world_size,
        "dp": args.world_size // args.tp,
        "tp": args.tp,
        "tokens_per_rank": args.seq,
        "layers": MODELS[args.model]["num_hidden_layers"],
        "graph_breaks": breaks,
        "graphs": {graph.phase: graph.node_count for graph in graphs},
        "launches": predicted.launches,
        "launches_by_kind": dict(predicted.launches_by_kind),
        "payload_bytes_by_kind": dict(payload),
        "topology": graphs[0].topology,
        "exposed_us_before": predicted.exposed_before_us,
        "exposed_us_after": predicted.exposed_after_us,
        "makespan_us_before": predicted.makespan_before_us,
        "makespan_us_after": predicted.makespan_after_us,
        "communication_us": predicted.communication_us,
        "peak_bytes_before": predicted.peak_before_bytes,
        "peak_bytes_after": predicted.peak_after_bytes,
    }


def show(results: dict[str, Any]) -> None:
    """The same as a table."""
    console = wide_console()
    table = Table(
        title=f"{results['model']}, {results['parameters'] / 1e9:.2f} B parameters, "
        f"{results['layers']} layers, {results['world_size']} ranks "
        f"(dp {results['dp']} x tp {results['tp']}), {results['tokens_per_rank']} tokens a rank: "
        f"{results['label']}"
    )
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    table.add_row("graph breaks", "", str(results["graph_breaks"]))
    for phase, nodes in results["graphs"].items():
        table.add_row(f"{phase} graph, nodes", "", str(nodes))
    table.add_row("collectives launched in a step", "", str(results["launches"]))
    for kind, count in sorted(results["launches_by_kind"].items()):
        size = results["payload_bytes_by_kind"][kind] / 2**20
        table.add_row(f"  {kind}", "", f"{count} ({size:.0f} MiB)")
    for label, key, scale, unit in (
        ("step", "makespan_us", 1e-3, "ms"),
        ("exposed communication", "exposed_us", 1e-3, "ms"),
        ("peak of activations and gathered weights", "peak_bytes", 2**-30, "GiB"),
    ):
        cells = [f"{results[f'{key}_{when}'] * scale:.2f} {unit}" for when in ("before", "after")]
        table.add_row(f"{label} (simulated on {results['topology']})", *cells)
    console.print(table)
    console.print(
        f"traced in {results['seconds']:.0f} s ({results['cpu_seconds']:.0f} s of one core) with {results['peak_rss_bytes'] / 2**30:.1f} GiB of "
        "memory at its peak"
    )
    for what in ("report", "trace"):
        if results[what]:
            console.print(f"{what}: {results[what]}", soft_wrap=True)
