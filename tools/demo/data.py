"""What the demo trains: a small random Llama on disk, and the sources of Python as bytes of
text.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

VOCABULARY = 256  # one token a byte
HEADS = 8
# What the ranks share -> dimensions of their mesh, and how many ranks there are.
PARALLEL = {
    "tensor": (("tp",), 2),
    "fsdp": (("dp",), 2),
    "both": (("dp", "tp"), 4),
}


@dataclass(frozen=True)
class Sizes:
    """Shapes of the model and of a batch; global, before sharding."""

    layers: int = 4
    hidden: int = 256
    batch: int = 4
    sequence: int = 128

    def __str__(self) -> str:
        return (
            f"Llama, {self.layers} layers, hidden {self.hidden}, {HEADS} heads, "
            f"batch {self.batch} x {self.sequence} bytes"
        )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without its progress bars and its advice, which two ranks would print twice."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def write_checkpoint(folder: Path, sizes: Sizes, seed: int = 0) -> int:
    """Write a Llama with random weights by ``save_pretrained``; returns its number of
    parameters.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=sizes.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=4 * sizes.sequence,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    with quiet_transformers():
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def mesh_of(parallel: str) -> DeviceMesh:
    """The mesh of all ranks; two of them share each weight, where there are four."""
    names, _ = PARALLEL[parallel]
    shape = (dist.get_world_size(),) if len(names) == 1 else (dist.get_world_size() // 2, 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def load(folder: Path, parallel: str, mesh: DeviceMesh) -> torch.nn.Module:
    """The model on its mesh. The batch is shared by ``fully_shard``."""
    from torch.distributed.fsdp import fully_shard

    if parallel == "tensor":
        return load_sharded(folder)
    model = _from_pretrained(folder)
    if parallel == "both":
        # Weights are equal on all ranks: none has to send its own around.
        parallelize_module(model, mesh["tp"], tensor_plan(), src_data_rank=None)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def load_sharded(folder: Path) -> torch.nn.Module:
    """``from_pretrained(..., tp_plan="auto")``: linear weights become DTensors over all ranks."""
    return _from_pretrained(folder, tp_plan="auto")


def _from_pretrained(folder: Path, **options: str) -> torch.nn.Module:
    from transformers import LlamaForCausalLM

    with quiet_transformers(), warnings.catch_warnings():
        # It would rather have a DistributedConfig, which only the newest transformers know.
        warnings.simplefilter("ignore", FutureWarning)
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    return model.train()


def tensor_plan() -> dict[str, ParallelStyle]:
    """Torch's way to share each weight's product, on a part of the ranks, where transformers
    takes all.
    """
    columns = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
    )
    plan: dict[str, ParallelStyle] = {
        f"model.layers.*.{name}": ColwiseParallel() for name in columns
    }
    rows = ("self_attn.o_proj", "mlp.down_proj")
    return plan | {f"model.layers.*.{name}": RowwiseParallel() for name in rows}


def share_of(batch: torch.Tensor, parallel: str, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of a batch [batch, sequence]: all of it, unless it is data parallel."""
    if parallel == "tensor":
        return batch
    return batch.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]


def text_batches(sizes: Sizes, steps: int) -> list[torch.Tensor]:
    """``steps`` batches of token ids [batch, sequence], each byte once, the same on every rank."""
    needed = steps * sizes.batch * sizes.sequence
    text = b""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if path.name.startswith("_"):
            continue
        text += path.read_bytes()
        if len(text) >= needed:
            break
    else:
        raise SystemExit(
            f"error: the sources of Python hold {len(text)} bytes, but {needed} are needed. "
            f"Ask for fewer --steps, or a smaller --batch or --sequence."
        )
    tokens = torch.tensor(list(text[:needed]), dtype=torch.long)
    return list(tokens.view(steps, sizes.batch, sizes.sequence))


def environment() -> dict[str, str]:
    """Variables for a rank: one thread each on two cores, loopback, no banners."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "KINETO_LOG_LEVEL": "99",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }
