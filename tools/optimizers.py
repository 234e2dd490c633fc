"""Run a training step with every optimizer of ``torch.optim`` on two gloo ranks, eager mode beside
a compiled step, and write the table of what each became.

    python tools/optimizers.py                  # run all, write the results and the page
    python tools/optimizers.py --only AdamW     # print some, write nothing
    python tools/optimizers.py --page           # write the page from the results

The parameters of a program are plain tensors, DTensors of a tensor parallel module, shards of
FSDP2, or all of them in one list. A step is ``backward()``, ``optimizer.step()`` and
``optimizer.zero_grad()`` in one function. Both runs must end in the same losses and parameters.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "test" / "support"))
RESULTS = ROOT / "tools" / "bench" / "results" / "optimizers.json"
PAGE = ROOT / "docs" / "reference" / "optimizers.md"

KINDS = ("plain", "DTensor", "FSDP2", "mixed")
OPTIONS = {"SGD": {"lr": 0.05, "momentum": 0.9}}
ONE_GRAPH = "one graph"
STEPS, WIDTH, TOLERANCE = 3, 8, 1e-6

HEAD = """# Optimizers in training steps

`python tools/optimizers.py` writes this page from
[its results](../../tools/bench/results/optimizers.json), torch {torch}.

Each entry is a program of {steps} steps on two gloo ranks. One compiled function holds forward,
`backward()`, `optimizer.step()` and `zero_grad()`. Losses and parameters are those of eager mode.
Parameters are float64: plain tensors, DTensors of a tensor parallel module, shards of FSDP2, or all
of these in one list, on two meshes. [Training steps](support.md#training-steps) has what else a
step may hold.

| entry | means |
| --- | --- |
| one graph | No break, and the first graph serves all steps |
| breaks | The graph ends for the reason given, and the step goes on |
| upstream | Eager mode without the plugin ends with an error: there is nothing to compare |

"""


def forms() -> Iterator[tuple[str, str]]:
    """Every optimizer with each of its forms."""
    from torch import optim

    for name in sorted(optim.__all__):
        cls = getattr(optim, name)
        if not isinstance(cls, type) or name == "Optimizer":
            continue
        options = inspect.signature(cls).parameters
        yield name, "for-loop"
        yield from ((name, form) for form in ("foreach", "fused") if form in options)


# --- One program ----------------------------------------------------------------------------------


def model_of(kind: str, bias: bool, sparse: bool) -> Any:
    """A module whose parameters are of the kind, the same each time."""
    import torch
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(0)
    if sparse:
        return nn.Embedding(WIDTH, WIDTH, sparse=True, dtype=torch.float64)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=bias)
    ).double()
    if kind == "mixed":
        model.insert(0, nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64))
        model.append(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64))
    if kind in ("DTensor", "mixed"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        first = 0 if kind == "DTensor" else 1
        plan = {f"{first}": ColwiseParallel(), f"{first + 2}": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
    if kind in ("FSDP2", "mixed"):
        # Another mesh than that of the DTensors, on the same ranks.
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        fully_shard(model[0 if kind == "FSDP2" else -1], mesh=mesh)
        if kind == "FSDP2":
            fully_shard(model, mesh=mesh)
    return model


def build(name: str, form: str, kind: str) -> tuple[list[Any], Callable[[Any], Any]]:
    """Parameters and the step."""
    import whole_step
    from torch import optim

    # Muon takes matrices alone, and SparseAdam sparse gradients.
    bias = name != "Muon" and kind != "mixed"
    model = model_of(kind, bias=bias, sparse=name == "SparseAdam")
    cls = getattr(optim, name)
    options: dict[str, Any] = dict(OPTIONS.get(name, {}))
    if form != "for-loop":
        options[form] = True
    elif "foreach" in inspect.signature(cls).parameters:
        options["foreach"] = False
    parameters = list(model.parameters())
    optimizer = cls(parameters, **options)

    make = whole_step.closure_step if name == "LBFGS" else whole_step.plain_step
    return parameters, make(model, optimizer)


def batches(name: str) -> list[Any]:
    """The same on all ranks: tensor parallel ones compute from one batch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    if name == "SparseAdam":
        return [torch.tensor([1, 2, each]) for each in range(STEPS)]
    return [torch.randn(4, WIDTH, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def first_line(error: BaseException) -> str:
    """What an error says first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def whole(tensors: list[Any]) -> list[Any]:
    """The values of tensors, whole."""
    from torch.distributed.tensor import DTensor

    return [
        (each.full_tensor() if isinstance(each, DTensor) else each).detach() for each in tensors
    ]


def outcome(name: str, form: str, kind: str) -> dict[str, str]:
    """What became of one program: ``state``, and ``why``."""
    import torch
    from torch._dynamo.utils import counters

    import dynamo_dist
    from inductor_passes.inductor.session import graph_passes_only

    torch.compiler.reset()
    dynamo_dist.disable()  # eager mode is upstream's
    try:
        parameters, step = build(name, form, kind)
        want = [step(x).detach() for x in batches(name)], whole(parameters)
    except Exception as error:  # whatever eager mode refuses it with
        return {"state": "upstream", "why": first_line(error)}
    counters.clear()
    dynamo_dist.enable()
    try:
        parameters, step = build(name, form, kind)
        with graph_passes_only():
            compiled = torch.compile(step, backend="dynamo_dist")
            found = [compiled(x).detach() for x in batches(name)], whole(parameters)
    except Exception as error:  # it goes into the table
        return {"state": "error", "why": first_line(error)}
    try:
        torch.testing.assert_close(found, want, rtol=TOLERANCE, atol=TOLERANCE)
    except AssertionError as error:
        return {"state": "differs", "why": first_line(error)}
    if breaks := [*counters["graph_break"]]:
        return {"state": "breaks", "why": " ".join(breaks[0].split("\n")[0].split())[:200]}
    graphs = counters["stats"]["unique_graphs"]
    return {"state": ONE_GRAPH if graphs == 1 else f"{graphs} graphs", "why": ""}


def programs(only: str) -> Iterator[tuple[str, str, str]]:
    """The programs whose optimizer's name is ``only``, or all."""
    for name, form in forms():
        for kind in ("plain",) if name == "SparseAdam" else KINDS:
            if only in ("", name):
                yield name, form, kind


def work(only: str, into: Path) -> None:
    """Run them as one of two ranks; the first writes the results."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, form, kind in programs(only):
        result = outcome(name, form, kind)
        if dist.get_rank() == 0:
            found.setdefault(f"{name} {form}", {})[kind] = result
            into.write_text(json.dumps(found))
            print(name, form, kind, *result.values(), flush=True)
    dist.destroy_process_group()


# --- All of them ----------------------------------------------------------------------------------


def measured(only: str = "", timeout_s: float = 3600.0) -> dict[str, dict[str, dict[str, str]]]:
    """Run the programs on two ranks. Raises SystemExit with what they said if a rank fails."""
    import preloaded

    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "found.json"
        well, said = preloaded.run_ranks(
            Path(__file__),
            2,
            [only, str(into)],
            {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"},
            folder=Path(folder),
            timeout_s=timeout_s,
        )
        if not well:
            raise SystemExit(said)
        found: dict[str, dict[str, dict[str, str]]] = json.loads(into.read_text())
        return found


def page(results: dict[str, Any]) -> str:
    """The page of results."""
    lines = [HEAD.format(torch=results["torch"], steps=STEPS)]
    lines += [f"| optimizer | {' | '.join(KINDS)} |", f"| --- |{' --- |' * len(KINDS)}"]
    reasons: dict[str, int] = {}
    for title, row in results["optimizers"].items():
        cells = []
        for kind in KINDS:
            each = row.get(kind, {"state": "", "why": ""})
            cell = each["state"]
            if each["why"]:
                cell += f" ({reasons.setdefault(each['why'], len(reasons) + 1)})"
            cells.append(cell)
        name, _, form = title.partition(" ")
        lines.append(f"| `{name}`, {form} | {' | '.join(cells)} |")
    lines += ["", "Reasons:", ""]
    for why, number in reasons.items():
        why = why.replace("`", "").strip()
        lines += textwrap.wrap(f"{number}. `{why}`", 100, subsequent_indent="   ")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run, or write the page alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="NAME", help="one optimizer; writes nothing")
    parser.add_argument("--page", action="store_true", help="write the page from the results")
    arguments = parser.parse_args()
    if arguments.page:
        PAGE.write_text(page(json.loads(RESULTS.read_text())))
        return 0
    found = measured(arguments.only)
    if arguments.only:
        print(json.dumps(found, indent=1))
        return 0
    import torch

    results = {"torch": torch.__version__.partition("+")[0], "optimizers": found}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(results))
    return 0


if __name__ == "__main__":
    if "RANK" in os.environ:
        work(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
