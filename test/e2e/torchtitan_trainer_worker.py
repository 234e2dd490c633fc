"""One rank of ``test_torchtitan.py``: torchtitan's own trainer on CPU ranks, eager and compiled by
upstream and by ours.

A case is a model and what of its debug configuration is set, ``llama3,tp=2`` or
``deepseek_v3,ep=2,ac=none``; each trains three times from the same weights on the same text: in
eager, with its own compile, and with its own compile after ``dynamo_dist.enable(inductor=True)``.
By hand::

    torchrun --nproc-per-node 2 test/e2e/torchtitan_trainer_worker.py FOLDER llama3,tp=2 deepseek_v3,ep=2

``short`` among the settings leaves C++ out (Inductor then calls torch's own kernels),
``ways=eager+ours`` a way. With ``spmd=spmd_types`` ``ways`` may name eager or upstream, not both: a
second trainer of upstream in a process has other meshes.

Set besides, for it to run on a CPU at all: the device (without a GPU it takes CUDA for granted),
figures of memory that a CPU has none of, no CUDA graphs, its ``ScaledDotProductAttention``
(FlexAttention has no backward on CPU), two layers, short sequences, weights in float32 unless
``dtype`` says otherwise, sums in the place of gloo's lacking PREMUL_SUM, text and a tokenizer made
here.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import sys
import time
import traceback
import types
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.tools.utils as titan
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import dynamo_dist
from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

titan.device_type = "cpu"
titan.device_module = types.SimpleNamespace(
    **{k: v for k, v in vars(torch.cpu).items() if k != "current_device"},
    current_device=lambda: 0,  # torch says "cpu"
    get_device_name=lambda *_: "CPU",
    get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda *_: {},
)
import torchtitan.distributed.utils as titan_distributed  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

if not hasattr(dist, "set_timeout"):  # before torch 2.14
    titan_distributed.set_pg_timeouts = lambda **_: None

STEPS, BATCH, LENGTH, WORDS = 3, 2, 32, 500
SHORT = "short"
DEGREES = {
    "fsdp": "data_parallel_shard_degree",
    "replicas": "data_parallel_replicate_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}


def write_text(folder):
    """A tokenizer of words and some lines of them, as torchtitan reads these from a folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<s>": 0, "</s>": 1, **{f"w{n}": n + 2 for n in range(WORDS)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "words").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "words" / "tokenizer.json"))
    specials = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "words" / "tokenizer_config.json").write_text(json.dumps(specials))
    generator = torch.Generator().manual_seed(0)
    lines = torch.randint(WORDS, (64, 3 * LENGTH), generator=generator).tolist()
    text = "\n".join(json.dumps({"text": " ".join(f"w{n}" for n in line)}) for line in lines)
    (folder / "text").mkdir(exist_ok=True)
    (folder / "text" / "data.json").write_text(text)


def configuration(case, folder):
    name, *settings = case.split(",")
    asked = dict(setting.split("=") for setting in settings if setting != SHORT)
    asked.pop("ways", None)
    registry = importlib.import_module(f"torchtitan.models.{name}.config_registry")
    config = getattr(registry, f"{name}_debugmodel")()
    model = config.model_spec.model
    model.layers = model.layers[:2]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.hf_assets_path = str(folder / "words")
    config.dataloader.dataset_path = str(folder / "text")
    config.dump_folder = str(folder / "out")
    config.debug.seed = 1
    config.debug.enable_structured_logging = False
    training, parallelism = config.training, config.parallelism
    training.disable_cuda_graphs = True
    training.steps, training.local_batch_size, training.seq_len = STEPS, BATCH, LENGTH
    training.mixed_precision_param = asked.pop("dtype", "float32")
    parallelism.spmd_backend = asked.pop("spmd", "partial_dtensor")
    if asked.pop("ac", "selective") == "none":
        config.activation_checkpoint = None
    for degree, value in asked.items():
        setattr(parallelism, DEGREES[degree], int(value))
    return config


def train(config, start):
    """Losses and norms of gradients, step by step, as the trainer logs them.

    ``start``: weights by name, local, to begin with; an empty one is given those that the trainer
    has drawn.
    """
    found = []
    trainer = Trainer(config)
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    local = {n: p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters()}
    with torch.no_grad():
        for name, weight in local.items():
            # On a CPU upstream draws the same for all shards, and we do not.
            weight.copy_(start.setdefault(name, weight.detach().clone()))
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **_: found.append(
        (loss, norm)
    )
    try:
        trainer.train()
    finally:
        trainer.close()
        gc.enable()  # which it has turned off
    assert len(found) == config.training.steps, found
    return torch.tensor(found)


WAYS = {
    "eager": contextlib.nullcontext,
    "upstream": contextlib.nullcontext,
    "ours": functools.partial(dynamo_dist.enabled, inductor=True),
}


def chosen(settings):
    """The ways that a case's settings name, or all."""
    named = [setting.removeprefix("ways=") for setting in settings if setting.startswith("ways=")]
    return named[0].split("+") if named else list(WAYS)


def run(case, folder):
    """Each way's ``values``, or ``error``, and ``graphs``, ``breaks``, ``launches`` by phase,
    ``seconds``.
    """
    found, start = {}, {}
    settings = case.split(",")
    torch._inductor.config.fallback_by_default = SHORT in settings
    for name in chosen(settings):
        torch.compiler.reset()
        counters.clear()
        records, config = {}, configuration(case, folder)
        config.compile.enable = name != "eager"
        begin = time.monotonic()
        unsubscribe = recorder.subscribe(lambda r, into=records: into.update({r.graph_id: r}))
        said = {}
        try:
            with WAYS[name]():
                said["values"] = train(config, start).tolist()
        except Exception:
            said["error"] = traceback.format_exc()[-2500:]
        unsubscribe()
        launches = {}
        for record in records.values():
            launches.setdefault(record.phase, []).append(len(record.collectives))
        found[name] = said | {
            "graphs": counters["stats"]["unique_graphs"],
            "breaks": dict(counters["graph_break"]),
            "launches": launches,
            "seconds": round(time.monotonic() - begin, 1),
        }
        print(
            f"rank {dist.get_rank()}, {case}, {name}: {json.dumps(found[name])[-1500:]}", flush=True
        )
    return found


def main():
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    os.environ.setdefault("HF_HOME", str(folder / "hf"))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.autograd.set_multithreading_enabled(False)  # as its own initialization does
    if rank == 0:
        write_text(folder)
    dist.barrier()
    results = {}
    for case in cases:
        results[case] = run(case, folder)
        (folder / f"{rank}.json").write_text(json.dumps(results))
        dist.barrier()
    leave_process()


main()
