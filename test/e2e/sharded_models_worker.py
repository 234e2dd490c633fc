"""One rank of ``test_sharded_models.py``: models of transformers under their own tensor parallel
plan, then sharded.

A case is ``model:layers:end``: the end ``graphs``, which then run as they are, or
``code``. Each writes ``<rank>.json`` in the folder of the first argument: "ok", or what went wrong.
"""

import contextlib
import json
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dynamo_dist
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.testing import leave_process

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": False,
    "tie_word_embeddings": False,
}
MODELS = {
    "llama": ("Llama", {}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "gemma3": (
        "Gemma3Text",
        {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def build(name, layers):
    import transformers

    kind, own = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(num_hidden_layers=layers, **SIZES, **own)
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"  # without sizes that depend on the routing
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def spread(model, mesh):
    """The model by its own plan on ``mesh``, as ``from_pretrained`` does it."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    return apply_tensor_parallelism(model, mesh, plan)


def gradients(model, call, tokens):
    """Every gradient by name, whole; the loss is a mean over tokens, and so over ranks."""
    logits = call(input_ids=tokens, use_cache=False).logits
    (logits.float().sin().mean() * 100).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def check(mesh, name, layers):
    tokens = torch.randint(3, 120, (4, 12), generator=torch.Generator().manual_seed(1))
    one, model = build(name, int(layers)), spread(build(name, int(layers)), mesh["tp"])
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(model, backend="dynamo_dist", fullgraph=True)
    share = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    found, expected = gradients(model, compiled, share), gradients(one, one, tokens)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=0, atol=1e-5, msg=lambda m, k=key: k + m)


def main():
    out, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dynamo_dist.enable()
    torch._inductor.config.fallback_by_default = True  # no C++ to compile
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for case in cases:
        busy = time.process_time()
        try:
            *case_of, end = case.split(":")
            with graph_passes_only() if end == "graphs" else contextlib.nullcontext():
                check(mesh, *case_of)
            results[case] = "ok"
        except Exception:
            results[case] = traceback.format_exc()
        print(f"{time.process_time() - busy:.1f} s {case}", file=sys.stderr, flush=True)
        with open(os.path.join(out, f"{dist.get_rank()}.json"), "w") as file:
            json.dump(results, file)
        dist.barrier()
    leave_process()


if __name__ == "__main__":
    main()
