"""Question: what do programs of one device pay for the plugin merely enabled? Processor time,
enabled over disabled.

    python tools/bench/enabled.py --json tools/bench/results/enabled.json

No distributed job, no DTensor, no backend of ours. One process switches the plugin on and off. A
round of a program runs it disabled, enabled, enabled, disabled; the figures are quartiles of the
ratios of rounds.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import nn

import dynamo_dist

torch.manual_seed(0)
INPUT = torch.randn(4, 16)
MODEL = nn.Sequential(
    *[
        nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
)
OPTIMIZER = torch.optim.AdamW(MODEL.parameters())


def train() -> None:
    """One training step."""
    OPTIMIZER.zero_grad()
    MODEL(INPUT[None]).square().mean().backward()
    OPTIMIZER.step()


def penalise_gradients() -> None:
    """A gradient of a gradient."""
    x = INPUT.clone().requires_grad_()
    (grad,) = torch.autograd.grad(F.softplus(x).sin().sum(), x, create_graph=True)
    grad.square().sum().backward()


def hessian() -> None:
    """A Hessian by ``torch.func``."""
    torch.func.hessian(lambda x: x.tanh().pow(3).sum())(INPUT[0, :4])


def _compile(backend: str) -> Callable[[], None]:
    def run() -> None:
        torch._dynamo.reset()
        compiled = torch.compile(MODEL, backend=backend)
        compiled(INPUT[None]).square().mean().backward()

    return run


COMPILED = torch.compile(MODEL, backend="aot_eager")


def compiled_step() -> None:
    """A step of a module that is compiled already."""
    COMPILED(INPUT[None]).square().mean().backward()


# Of each: the program, how many times in a row (switching takes a second itself), and the rounds.
PROGRAMS: dict[str, tuple[Callable[[], None], int, int]] = {
    "eager training step": (train, 100, 16),
    "eager gradient of a gradient": (penalise_gradients, 1500, 16),
    "torch.func.hessian": (hessian, 100, 16),
    "step compiled by aot_eager": (compiled_step, 150, 16),
    "compile by eager": (_compile("eager"), 1, 12),
    "compile by aot_eager": (_compile("aot_eager"), 1, 12),
    "compile by inductor": (_compile("inductor"), 1, 6),
}


def seconds(call: Callable[[], None], times: int, enabled: bool) -> float:
    """Processor time of the process; the first call, which may fill caches and compile, is not
    in it for repeated ones.
    """
    (dynamo_dist.enable if enabled else dynamo_dist.disable)()
    if times > 1:
        call()
    gc.collect()
    began = time.process_time()
    for _ in range(times):
        call()
    return time.process_time() - began


def ratios(name: str) -> list[float]:
    """Processor time enabled over disabled, of each round of a program."""
    call, times, rounds = PROGRAMS[name]
    found = []
    for number in track(range(rounds + 1), name, transient=True):
        ways = [False, True, True, False] if number % 2 else [True, False, False, True]
        spent = {True: 0.0, False: 0.0}
        for way in ways:
            spent[way] += seconds(call, times, way)
        found.append(spent[True] / spent[False])
    return found[1:]  # the first round warms up


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="programs whose name holds this")
    args = parser.parse_args()
    figures = {}
    with torch._inductor.config.patch(force_disable_caches=True):
        for name in PROGRAMS:
            if args.only in name:
                low, middle, high = quantiles(ratios(name), n=4)
                figures[name] = [round(each, 4) for each in (low, middle, high)]
                print(f"{name}: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if args.json:
        found = {"torch": torch.__version__, "quartiles": figures}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
