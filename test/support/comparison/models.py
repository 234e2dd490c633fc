"""Models of transformers that have a tensor-parallel plan: small, random, on all ranks as threads.

Each is what one device computes: forward, training, with checkpoints, and generating.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from comparison.outcome import End, Unfit
from comparison.program import judged, mesh_on_cpu
from comparison.programs import on_all_ranks

EAGER_WAYS = ("forward", "training", "checkpointing", "generating")
COMPILED_WAYS = ("compiled_forward", "compiled_training")
ON_RANKS = (
    """llama qwen3 gemma3_text exaone4 mixtral deepseek_v3 phi3 cohere2 qwen3_moe olmo2""".split()
)
WAYS_ON_RANKS = ("training", "generating", "compiled_training")
RANKS = 2
TOKENS = 12
# What a configuration may call its sizes, and the sizes of a model of two layers.
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "embedding_size": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_hidden_size": 64,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_blocks": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 8,
    "attention_head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "max_position_embeddings": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 16,
    "v_head_dim": 8,
    "sliding_window": 8,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "num_kv_shared_layers": 0,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "dropout": 0.0,
}
# Tried in turn until a model of the type can be called.
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"attn_layer_period": 2, "attn_layer_offset": 1, "layer_types": ["mamba", "attention"]},
    {"layer_types": ["full_attention", "full_attention"]},
    {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "head_dim": 16, "rope_parameters": None},
    {"num_key_value_heads": 4, "linear_num_key_heads": 4, "head_dim": 16},
)
_working: dict[str, dict[str, Any]] = {}


def architectures() -> list[str]:
    """The model types whose configuration, or that of their text, has a plan."""
    quiet()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(Exception):
            if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None):
                found.append(name)
    return sorted(found)


def names(part: str) -> list[str]:
    """Each model in each way; on real ranks some in some ways."""
    if part == "models-ranks":
        return [f"{name}-{way}" for name in ON_RANKS for way in WAYS_ON_RANKS]
    ways = COMPILED_WAYS if part == "models-compiled" else EAGER_WAYS
    return [f"{name}-{way}" for name in architectures() for way in ways]


def prepare(part: str, side: str) -> Callable[[str], End]:
    """Runs a model in one way."""
    quiet()

    def run(program: str) -> End:
        name, way = program.rsplit("-", 1)
        build(name)  # raises here where no model can be made
        return on_all_ranks((RANKS,), lambda rank, mesh: pairs(name, way, mesh), 1e-5)

    return run


def mesh_of(part: str, name: str) -> tuple[int, ...]:
    """Replicas of tensor-parallel ranks."""
    return (2, 2)


def on_rank(part: str, name: str, side: str, rank: int) -> End:
    """Run a model on this rank of several processes."""
    quiet()
    mesh = mesh_on_cpu(mesh_of(part, name))
    return judged(pairs(*name.rsplit("-", 1), mesh), f"rank {rank}, ", 1e-5)


def pairs(name: str, way: str, mesh: Any) -> Any:
    """What this rank computes, and what one device computes."""
    import torch

    one, many = build(name), spread(build(name), mesh["tp"] if mesh.ndim > 1 else mesh)
    if way == "generating":
        with torch.no_grad():
            options = {"max_new_tokens": 4, "do_sample": False}
            yield many.generate(_tokens(), **options), one.generate(_tokens(), **options)
        return
    if way in ("forward", "compiled_forward"):
        call = _compiled(many) if way == "compiled_forward" else many
        with torch.no_grad():
            yield call(input_ids=_tokens()).logits, one(input_ids=_tokens()).logits
        return
    if way == "checkpointing":
        for model in (one, many):
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    tokens = _tokens()
    call = _compiled(many) if way == "compiled_training" else many
    yield _gradients(many, call, tokens), _gradients(one, one, _tokens())


def build(name: str) -> Any:
    """A model of this type with two layers, the same numbers each time. Raises Unfit if there is
    none.
    """
    if name not in _working:
        problem = ""
        for variant in VARIANTS:
            try:
                _build(name, variant)(input_ids=_tokens())
            except Exception as error:
                problem = problem or f"{type(error).__name__}: {error}"[:300]
            else:
                _working[name] = variant
                break
        else:
            raise Unfit(problem)
    return _build(name, _working[name])


def _build(name: str, variant: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[name]
    default = kind()
    fitting = {key: value for key, value in variant.items() if hasattr(default, key)}
    config = kind(**{**_small(default), **fitting})
    config.tie_word_embeddings = (
        False  # from_pretrained ties after it has spread; here is nothing to load
    )
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def spread(model: Any, mesh: Any) -> Any:
    """The model by its own plan on ``mesh``, as ``from_pretrained`` does it."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    config = DistributedConfig(tp_size=mesh.size())
    plan, *_ = model._resolve_parallel_plans(config)
    model = apply_tensor_parallelism(model, mesh, plan)
    model.tie_weights()
    return model


def _small(config: Any) -> dict[str, Any]:
    given = config.to_dict()
    layers = given.get("num_hidden_layers")
    found = {
        key: size
        for key, size in SIZES.items()
        if key in given and (given[key] is not None or size is None)
    }
    for key, value in given.items():
        if isinstance(value, list) and len(value) == layers:
            kinds = list(dict.fromkeys(map(str, value)))
            first = [value[[str(v) for v in value].index(kind)] for kind in kinds]
            found[key] = (first + value)[:2] if len(kinds) > 1 else value[:2]
    for key in getattr(type(config), "sub_configs", {}):
        if (part := getattr(config, key, None)) is not None:
            found[key] = {**given[key], **_small(part)}
    return found


def _tokens() -> Any:
    import torch

    return torch.randint(3, 120, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def _gradients(model: Any, call: Any, tokens: Any) -> list[Any]:
    """The loss over the whole batch, and every gradient by name, whole."""
    from torch.distributed.tensor import DTensor

    logits = call(input_ids=tokens).logits
    # A mean: of the batch, and so of what the replicas hold.
    loss = logits.float().sin().mean() * 100
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in found.items()}
    return [whole[name] for name in sorted(whole)]


def _compiled(model: Any) -> Any:
    import torch

    return torch.compile(model, backend="aot_eager")


def quiet() -> None:
    """No downloads, and no warnings of transformers."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    import transformers

    transformers.logging.set_verbosity(50)
