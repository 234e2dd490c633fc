"""transformers' Llama with ``tp_plan``, trained and generating: torchrun --nproc-per-node 2
tools/examples/llama.py

The checkpoint is random and small, written to a temporary folder. Generation keeps keys and values
in a static cache, so that one compiled step serves every token.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from shown import leave, show

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
from data import Sizes, load_sharded, write_checkpoint

SIZES = Sizes(layers=2, hidden=128, batch=2, sequence=32)
NEW_TOKENS = 12


def generated(model: torch.nn.Module, prompt: torch.Tensor) -> torch.Tensor:
    """Greedy tokens [batch, length], one step a token."""
    from transformers import StaticCache

    length = prompt.shape[1] + NEW_TOKENS
    cache = StaticCache(config=model.config, max_cache_len=length)
    step = prompt
    tokens = [prompt]
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            at = sum(t.shape[1] for t in tokens) - step.shape[1]
            positions = torch.arange(at, at + step.shape[1])[None]
            logits = model(
                step, past_key_values=cache, position_ids=positions, use_cache=True
            ).logits
            step = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(step)
    return torch.cat(tokens, 1)


def main() -> None:
    """Train a step each way, then generate each way."""
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.get_rank() == 0:
            write_checkpoint(Path(own), SIZES)
        dist.broadcast_object_list(folder)  # the first rank's, once it is written
        model = load_sharded(Path(folder[0]))
        dist.barrier()
    torch.manual_seed(0)
    tokens = torch.randint(256, (SIZES.batch, SIZES.sequence))
    trained = show(
        model, {"input_ids": tokens, "labels": tokens}, "Llama with tp_plan, one training step"
    )
    eager = generated(model, tokens[:, :8])
    torch.compiler.reset()
    compiled = generated(torch.compile(model, backend="dynamo_dist"), tokens[:, :8])
    if dist.get_rank() == 0:
        same = "the same as eager's" if torch.equal(eager, compiled) else "DIFFERENT from eager's"
        print(f"{NEW_TOKENS} generated tokens with a cache of keys and values: {same}", flush=True)
    if not torch.equal(eager, compiled):
        raise SystemExit(1)
    leave(trained)


if __name__ == "__main__":
    main()
