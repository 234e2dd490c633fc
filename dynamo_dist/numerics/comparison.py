"""``dynamo_dist.compare``: one step of a model in eager mode, under upstream Inductor and under
ours, side by side.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from dynamo_dist import activation
from dynamo_dist.diagnostics import collect
from dynamo_dist.errors import CompareError
from dynamo_dist.numerics.differences import (
    difference,
    new_leaf,
    parameters_of,
    run_step,
    tensors_of,
)
from dynamo_dist.torch_compat import dynamo_compiler
from dynamo_dist.torch_compat.dynamo_modules import uncompiled
from inductor_passes.inductor.installed import uninstalled
from inductor_passes.report.figures import totals

TITLES = {"eager": "eager", "upstream": "upstream Inductor", "ours": "dynamo_dist"}
BACKENDS: Mapping[str, Any] = {"upstream": "inductor", "ours": "dynamo_dist"}
# How the names of c10d's operators begin, in eager and in compiled code alike; the first that fits
# counts.
_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    **{kind: kind for kind in ("broadcast", "gather", "scatter", "reduce", "recv", "send")},
}


@dataclass(frozen=True, slots=True)
class VariantResult:
    """One variant on this rank.

    differences: how outputs and gradients differ from eager mode's, by name; those that are close
        are left out.
    launches: collectives that a step launches when it runs, by kind. first_s: seconds of the first
        step, with its compile. step_ms: each timed step. exposed_us: exposed time of the graphs
        before our passes and after them, simulated. error: why upstream could not compile or run
        the model.
    """

    differences: Mapping[str, str] = field(default_factory=dict)
    graphs: int = 0
    graph_breaks: int = 0
    launches: Mapping[str, int] = field(default_factory=dict)
    first_s: float = 0.0
    step_ms: tuple[float, ...] = ()
    exposed_us: tuple[float, float] = (0.0, 0.0)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ``compare`` found on this rank. ``ok``: on all ranks ours is close to eager, without
    a graph break.
    """

    variants: Mapping[str, VariantResult]
    ok: bool

    def __str__(self) -> str:
        table = Table("", title="agree" if self.ok else "DIFFER")
        for name in self.variants:
            table.add_column(TITLES[name], justify="right")
        for label, text in _ROWS.items():
            cells = ("failed" if r.error else text(r) for r in self.variants.values())
            table.add_row(label, *cells)
        out = io.StringIO()
        Console(file=out, width=110, no_color=True, force_terminal=False).print(table)
        for name, result in self.variants.items():
            found_text = [f"{what} {how}" for what, how in result.differences.items()]
            for line in [*found_text, result.error] if result.error else found_text:
                out.write(f"{TITLES[name]}: {line}\n")
        return out.getvalue().rstrip("\n")


_ROWS: Mapping[str, Callable[[VariantResult], str]] = {
    "tensors that differ from eager": lambda r: str(len(r.differences)),
    "graphs": lambda r: str(r.graphs),
    "graph breaks": lambda r: str(r.graph_breaks),
    "collectives launched in a step": lambda r: (
        "\n".join(f"{count} {kind}" for kind, count in sorted(r.launches.items())) or "none"
    ),
    "step, ms, median": lambda r: f"{statistics.median(r.step_ms):.2f}",
    "  shortest to longest": lambda r: f"{min(r.step_ms):.2f} to {max(r.step_ms):.2f}",
    "first step, s (compiles)": lambda r: f"{r.first_s:.1f}",
    # Only graphs that the plugin compiles are simulated: for the others a zero would mislead.
    "exposed, us (simulated)": lambda r: (
        "{:.0f} -> {:.0f}".format(*r.exposed_us) if any(r.exposed_us) else "-"
    ),
}


def compare(
    model: Callable[..., Any],
    inputs: object,
    *,
    steps: int = 10,
    loss: Callable[[object], torch.Tensor] | None = None,
    options: Mapping[str, object] | None = None,
) -> Comparison:
    """Run ``model`` eager, under upstream Inductor and under ours, and say how they differ.

    model: a module or function; parameters may be DTensors. It runs as it is, and its values,
        gradients, mode and the random state are restored afterwards.
    inputs: one tensor, a tuple or list of arguments, or a mapping of keyword arguments, with local
        shapes where they are plain tensors.
    steps: timed steps of each variant. The variants take turns, so that a busy machine slows all of
        them equally.
    loss: makes the scalar of the outputs; by default their ``loss``, or the sum of the floating
        ones' means. Gradients are compared where it requires one.
    options: of our backend, such as ``{"topology": "h100x8"}``.

    Every rank of the job calls it. It discards everything that this process had compiled. A model
    that draws random numbers differs, unless ``torch._inductor.config.fallback_random`` is set.

    Raises CompareError if eager or ours fails. The other ranks then wait for this one, as in
    training.
    """
    model = uncompiled(model)
    if steps < 1:
        raise CompareError(f"compare() got steps={steps}.", "It times at least one step.")
    parameters = parameters_of(model)
    device = next((t.device for t in tensors_of([inputs, parameters])), torch.device("cpu"))
    functions: dict[str, Callable[..., object]] = {}

    def step(variant: str) -> dict[str, torch.Tensor]:
        given = pytree.tree_map(new_leaf, inputs)
        kwargs = dict(given) if isinstance(given, Mapping) else {}
        args = () if kwargs else tuple(given) if isinstance(given, (tuple, list)) else (given,)
        return run_step(functions[variant], parameters, args, kwargs, loss or default_loss)

    results: dict[str, VariantResult] = {}
    expected: dict[str, torch.Tensor] = {}
    torch.compiler.reset()
    with _left_as_it_was(model, device) as restore:
        for name in TITLES:
            restore()
            graphs, start = dynamo_compiler.unique_graphs(), time.perf_counter()
            try:
                with plugin_for(name), collect() as collector:
                    functions[name] = compiled(model, name, options)
                    found = step(name)
                    first_s = time.perf_counter() - start
                    with launches_counted() as launches:
                        step(name)
            except Exception as error:
                del functions[name]
                # The first paragraph: torch appends advice on its own debugging variables.
                found_text = " ".join(str(error).split("\n\n")[0].split())
                why = f"{type(error).__name__}: {found_text}"
                if name != "upstream":
                    raise CompareError(f"compare() failed while running {name}: {why}.") from error
                # Upstream cannot compile all that ours can; without it there is still something to
                # compare.
                results[name] = VariantResult(error=why)
                continue
            expected = expected or found
            simulated = totals(collector.graphs)
            results[name] = VariantResult(
                differences=_differences(found, expected),
                graphs=dynamo_compiler.unique_graphs() - graphs,
                graph_breaks=sum(record.count for record in collector.breaks),
                launches=dict(launches),
                first_s=first_s,
                exposed_us=(simulated.exposed_before_us, simulated.exposed_after_us),
            )
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(steps):
            for name in functions:
                with plugin_for(name):
                    # Not timed: switching the plugin has emptied DTensor's caches of decisions.
                    step(name)
                    times[name].append(_ms(functools.partial(step, name), device))
    results |= {name: replace(results[name], step_ms=tuple(ms)) for name, ms in times.items()}
    ours = results["ours"]
    return Comparison(
        results, _on_all_ranks(not ours.differences and not ours.graph_breaks, device)
    )


def default_loss(outputs: object) -> torch.Tensor | None:
    """The outputs' own ``loss`` if they have one, else the sum of the means of the floating
    tensors.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    terms = [each.float().mean() for each in tensors_of(outputs) if each.requires_grad]
    return torch.stack(list(map(_local, terms))).sum() if terms else None


@contextlib.contextmanager
def plugin_for(variant: str) -> Iterator[None]:
    """The plugin on for ours, truly off for the others, ``install()`` too; afterwards as it was
    before.
    """
    with activation.restored(), contextlib.ExitStack() as stack:
        if variant == "ours":
            activation.enable()
        else:
            activation.disable()
            stack.enter_context(uninstalled())
        yield


def compiled(
    model: Callable[..., Any], variant: str, options: Mapping[str, Any] | None = None
) -> Callable[..., object]:
    """The model itself for eager, else as a user would compile it. ``options`` go to ours alone.

    Call it, and what it returns, inside ``plugin_for(variant)``. Dynamo keeps compiled code by
    backend: call ``torch.compiler.reset()`` before the first, so that none is found that a user
    compiled.
    """
    if variant == "eager":
        return model
    given = dict(options or {}) if variant == "ours" else None
    return torch.compile(model, backend=BACKENDS[variant], options=given)


@contextlib.contextmanager
def launches_counted() -> Iterator[Counter[str]]:
    """Count the collectives that this process starts inside the block, by kind, from any caller.

    The profiler sees them at the dispatcher, so it slows what it counts: not for timed steps.
    """
    counts: Counter[str] = Counter()
    # Kineto announces each profile on stderr, at any level it knows; it reads this once.
    quiet = "KINETO_LOG_LEVEL" not in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            yield counts
    finally:
        if quiet:
            os.environ.pop("KINETO_LOG_LEVEL", None)
    for event in profiler.events() or ():
        if event.name.startswith("c10d::"):
            name = event.name.removeprefix("c10d::").lstrip("_")
            counts.update([kind for begin, kind in _KINDS.items() if name.startswith(begin)][:1])


@contextlib.contextmanager
def _left_as_it_was(model: object, device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield what brings back values, mode and random state of before the block; its end does, too.

    The model itself is run, not a copy: a deep copy keeps closures, such as the forward that
    tensor-parallel wrappers install, that still point at the original's parameters.
    """
    module = model if isinstance(model, nn.Module) else nn.Module()
    tensors = [_local(t.detach()) for t in (*module.parameters(), *module.buffers())]
    values = [tensor.clone() for tensor in tensors]
    modes = [(each, each.training) for each in module.modules()]
    generators = [torch, *([torch.get_device_module(device)] if device.type != "cpu" else [])]
    states = [each.get_rng_state() for each in generators]

    def restore() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        for each, training in modes:
            each.training = training
        for generator, state in zip(generators, states, strict=True):
            generator.set_rng_state(state)

    try:
        yield restore
    finally:
        restore()


def _differences(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> dict[str, str]:
    pairs = {name: (found.get(name), expected.get(name)) for name in {**expected, **found}}
    found_text = {name: difference(*map(_local, pair)) for name, pair in pairs.items()}
    return {name: how for name, how in found_text.items() if how}


def _local(tensor: object) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _ms(step: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of a call, up to the end of its work on the device."""
    wait = contextlib.nullcontext if device.type == "cpu" else torch.accelerator.synchronize
    wait()
    start = time.perf_counter()
    step()
    wait()
    return 1e3 * (time.perf_counter() - start)


def _on_all_ranks(holds: bool, device: torch.device) -> bool:
    if not dist.is_initialized():
        return holds
    word = torch.tensor(int(holds), device=device)
    dist.all_reduce(word, dist.ReduceOp.MIN)
    return bool(word)
