"""``dynamo_dist.compare``: eager, stock Inductor and ours on one model, side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.benchmark import state, variants
from dynamo_dist.benchmark.measure import launches_counted, peak_memory, step_times
from dynamo_dist.benchmark.records import VARIANTS, Comparison, RankResult, VariantResult
from dynamo_dist.errors import CompareError
from dynamo_dist.job.rendezvous import Rendezvous
from dynamo_dist.numerics.differences import distance
from dynamo_dist.reporting import collect
from dynamo_dist.torch_compat.dynamo import counters
from inductor_passes.torch_compat import c10d

WARM_UP_STEPS = 2


def compare(
    model: Callable[..., Any],
    inputs: Any,
    *,
    steps: int = 10,
    backward: bool | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    topology: str | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    options: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
) -> Comparison:
    """Run ``model`` eager, under stock Inductor and under ours, and say how they differ.

    model: a module or function; parameters may be DTensors. It is run as it is, and left as it was:
        values, gradients, random state. inputs: one tensor, a tuple or list of arguments, or a
        mapping of keyword arguments, with local shapes where they are plain tensors.
    steps: timed steps of each variant, after the first and two to warm up. The variants take turns
        step by step, so that a busy machine slows all of them alike.
    backward: also run and compare gradients; by default where something requires one. ``loss`` makes
        the scalar of the outputs; by default their ``loss`` or the sum of the floating ones' means.
    topology: what the simulated figures are for; ``options`` are more options of our backend.
    rtol, atol: tolerance of ``ok``; by default one for each dtype.

    Every rank of an initialised process group must call it, and gets the result of all of them.
    Forgets everything that this process had compiled; it is compiled again when called.

    Raises CompareError if model and inputs are on several devices or on a mesh for another one, if
    eager or ours fails, and if another rank failed or does not come within ``timeout_s``, naming it.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile has wrapped
    if steps < 1:
        raise CompareError(f"compare() got steps={steps}.", "It times at least one step.")
    device = state.devices_of(model, inputs)
    ranks = _ranks(timeout_s)
    torch.compiler.reset()
    with state.kept(model, device) as saved:
        if backward is None:
            backward = _anything_requires_grad(model, inputs)
        bench = _Bench(
            model, inputs, device, backward, loss or default_loss, saved, ranks, steps, rtol, atol
        )
        ours = {**(options or {}), **({"topology": topology} if topology is not None else {})}
        results = bench.time_in_turn([bench.run(variant, ours) for variant in VARIANTS])
    mine = RankResult(ranks.rank, tuple(results))
    everyone = ranks.meet("the results", mine.to_json())
    ranks.leave()
    chosen = mine["ours"].simulated
    return Comparison(
        ranks=tuple(RankResult.from_json(data) for data in everyone),
        world_size=ranks.world_size,
        steps=steps,
        backward=backward,
        device=_device_name(device),
        topology=chosen.topology if chosen else topology or "",
        notes=tuple(bench.notes),
    )


def default_loss(outputs: Any) -> torch.Tensor:
    """The outputs' own ``loss`` if they have one, else the sum of the means of the floating tensors.

    Raises CompareError if there is no floating tensor.
    """
    own = getattr(outputs, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    terms = [t.float().mean() for _, t in state.tensors_of(outputs) if t.requires_grad]
    if not terms:
        raise CompareError(
            "The outputs hold no tensor that a gradient can start from.",
            "",
            "Pass loss=..., a function of the outputs, or backward=False.",
        )
    return torch.stack([state.local(term) for term in terms]).sum()


def _anything_requires_grad(model: object, inputs: object) -> bool:
    tensors = [tensor for _, tensor in state.tensors_of(inputs)]
    if isinstance(model, torch.nn.Module):
        tensors += list(model.parameters())
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _device_name(device: torch.device) -> str:
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type.upper() if name is None else str(name(device))


def _ranks(timeout_s: float) -> Rendezvous:
    store = c10d.job_store()
    if store is None:  # one process: there is nobody to meet
        return Rendezvous(None)
    return Rendezvous(store, dist.get_rank(), dist.get_world_size(), deadline_s=timeout_s)


@dataclass
class _Numbers:
    outputs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]


class _Bench:
    """The runs of one comparison on one rank."""

    def __init__(
        self,
        model: Callable[..., Any],
        inputs: Any,
        device: torch.device,
        backward: bool,
        loss: Callable[[Any], torch.Tensor],
        saved: state.Saved,
        ranks: Rendezvous,
        steps: int,
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.device = device
        self.backward = backward
        self.loss = loss
        self.saved = saved
        self.ranks = ranks
        self.steps = steps
        self.tolerance = (rtol, atol)
        self.expected: _Numbers | None = None
        self.functions: dict[str, Callable[..., Any]] = {}
        self.notes: list[str] = []

    def run(self, variant: str, options: Mapping[str, Any]) -> VariantResult:
        """Numbers of the first step, memory of the next, launches of one more; no times yet."""
        result = VariantResult(variant)

        def numbers_and_costs() -> None:
            nonlocal result
            with variants.plugin_for(variant):
                fn = variants.compiled(self.model, variant, options)
                result = self._costs(fn, self._first(fn, variant))
            self.functions[variant] = fn

        error = self._attempt(f"running {variant}", numbers_and_costs, may_fail=variant == "stock")
        return VariantResult(variant, within_tolerance=False, error=error) if error else result

    def time_in_turn(self, results: Sequence[VariantResult]) -> list[VariantResult]:
        """The same results with the times of ``steps`` rounds, in which each variant has a timed step.

        One that is not timed comes before it: switching the plugin empties DTensor's caches of sharding
        decisions, which the eager parts of a step fill again.
        """
        times: dict[str, list[float]] = {name: [] for name in self.functions}

        def rounds() -> None:
            for _ in range(self.steps):
                for name, fn in self.functions.items():
                    with variants.plugin_for(name):
                        step = partial(self._step, fn, False)
                        times[name] += step_times(step, 2, self.device)[1:]

        self._attempt("timing", rounds)
        return [replace(r, step_ms=tuple(times.get(r.variant, ()))) for r in results]

    def _attempt(self, phase: str, action: Callable[[], None], may_fail: bool = False) -> str:
        """Do it and leave the model as it was; the error's text if it ``may_fail`` and all ranks did.

        Raises CompareError, with every rank's reason, for any other failure on any rank.
        """
        failure = None
        try:
            action()
        except Exception as error:
            failure = error
        finally:
            self.saved.restore()
        failures = self.ranks.conclude(phase, failure)
        if not failures:
            return ""
        # Stock cannot compile all that ours can; without it there is still something to compare.
        if may_fail and len(failures) == self.ranks.world_size:
            return failures[self.ranks.rank]
        self.ranks.leave()
        told = "; ".join(f"on rank {rank}: {text}" for rank, text in failures.items())
        raise CompareError(
            f"compare() failed while {phase}, {told}",
            "The other ranks were fine." if len(failures) < self.ranks.world_size else "",
            "See the exception above for where.",
        ) from failure

    def _first(self, fn: Callable[..., Any], variant: str) -> VariantResult:
        self.saved.restore()
        graphs = counters.unique_graphs()
        numbers: list[_Numbers] = []
        with collect() as collector:
            (first_ms,) = step_times(lambda: numbers.append(self._step(fn)), 1, self.device)
        if variant == "eager":
            self.expected = numbers[0]
            if self.saved.drew_random_numbers():
                self.notes.append(
                    "The model draws random numbers; compiled code draws others from the same seed, "
                    "unless torch._inductor.config.fallback_random is set."
                )
            return VariantResult(variant, first_s=first_ms / 1e3)
        assert self.expected is not None
        made = counters.unique_graphs() - graphs
        if not made:
            self.notes.append(f"{variant} compiled no graph of this model: it ran as in eager.")
        outputs = distance(self.expected.outputs, numbers[0].outputs, *self.tolerance)
        grads = distance(self.expected.grads, numbers[0].grads, *self.tolerance)
        return VariantResult(
            variant,
            max_output_diff=outputs.largest,
            max_grad_diff=grads.largest,
            worst=grads.worst if grads.largest > outputs.largest else outputs.worst,
            within_tolerance=outputs.within and grads.within,
            graphs=made,
            graph_breaks=variants.break_count(collector),
            first_s=first_ms / 1e3,
            simulated=variants.simulated(collector.graphs) if variant == "ours" else None,
        )

    def _costs(self, fn: Callable[..., Any], result: VariantResult) -> VariantResult:
        self.saved.restore()
        with peak_memory(self.device) as peak:
            step_times(partial(self._step, fn, False), WARM_UP_STEPS, self.device)
        with launches_counted() as launches:
            self._step(fn, keep=False)
        return replace(
            result,
            memory_bytes=peak.bytes,
            memory_source=peak.source,
            launches=dict(launches),
        )

    def _step(self, fn: Callable[..., Any], keep: bool = True) -> _Numbers:
        given = state.fresh_copy(self.inputs)
        args, kwargs = state.as_call(given)
        for parameter, _ in self.saved.grads:
            parameter.grad = None
        outputs = fn(*args, **kwargs)
        if self.backward:
            self.loss(outputs).backward()
        if not keep:
            return _Numbers({}, {})
        found = {p: state.local(t.detach()).clone() for p, t in state.tensors_of(outputs)}
        return _Numbers(found, state.gradients(self.model, state.tensors_of(given, "input")))
