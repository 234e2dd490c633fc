"""``torch.compile(model, backend="dynamo_dist")``.

Dynamo loads a backend's entry point once and calls the backend only after it has traced, which is
too late to enable trackers. So the entry point names an attribute that does not exist until it is
asked for: asking enables the plugin, and ``disable()`` makes Dynamo ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from dynamo_dist import activation
from dynamo_dist.config import DistConfig, agreement_seconds

if TYPE_CHECKING:
    from inductor_passes.pass_options import PassOptions


def __getattr__(name: str) -> Callable[..., Any]:
    if name == "dynamo_dist":
        activation.enable()
        from dynamo_dist.torch_compat.dynamo import compiler

        compiler.forget_backend(name)
        return compile_graph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: Inductor with our passes, by configuration of this compile alone.

    ``mode`` means what it means for ``backend="inductor"``; ``options`` are ours
    (``inductor_passes.PassOptions``) and any of Inductor's. Raises OptionError, naming the known
    ones, for an option or a pass that neither knows.
    """
    from dynamo_dist.run.below_autograd import BELOW_AUTOGRAD, below_autograd
    from dynamo_dist.run.gradients import DIRECT_GRADIENTS, direct
    from dynamo_dist.run.guards import lighten
    from dynamo_dist.run.inputs import merge_inputs
    from dynamo_dist.trace.randomness import replicas
    from inductor_passes.agree.graph import frame_of_graph
    from inductor_passes.attach.compile import compile_split
    from inductor_passes.graph.source_lines import add_library
    from inductor_passes.pass_options import register_switch, split

    add_library(__file__)  # this package's functions are traced in the place of torch's
    register_switch(DIRECT_GRADIENTS)
    register_switch(BELOW_AUTOGRAD)
    # An unknown option is an error before anything is done.
    own, inductor = split(options or {}, mode)
    example_inputs = merge_inputs(gm, example_inputs, lighten())

    def compile_(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with direct(not own.exact and DIRECT_GRADIENTS not in own.disable):
            replicas.forget()
            compiled = compile_split(
                gm,
                inputs,
                own,
                inductor,
                around=lambda: below_autograd(BELOW_AUTOGRAD not in own.disable),
            )
            replicas.check(agreement_seconds(), frame_of_graph())
            return compiled

    if own.plan == "off":
        return compile_(gm, example_inputs)
    return _compile_repaired(gm, example_inputs, compile_, own)


def _compile_repaired(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    compile_: Callable[..., Callable[..., Any]],
    own: PassOptions,
) -> Callable[..., Any]:
    from dynamo_dist.sharding.plan.prices import prices_of
    from dynamo_dist.sharding.plan.repair import compile_repaired
    from dynamo_dist.torch_compat.dynamo import compiler

    return compile_repaired(
        gm,
        inputs,
        compile_,
        prices_of(own.topology, inputs),
        f"{activation.digest(DistConfig.from_env())} {compiler.cache_key_tag()}",
        None if own.plan == "repair" else own.plan,
    )
