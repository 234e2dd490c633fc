"""``torch.compile(model, backend="dynamo_dist")``.

Dynamo loads a backend's entry point once and calls the backend only after it has traced, which is
too late to enable trackers. So the entry point names an attribute that does not exist until it is
asked for: asking enables the plugin, and ``disable()`` makes Dynamo ask again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

from dynamo_dist import activation


def __getattr__(name: str) -> Callable[..., object]:
    if name == "dynamo_dist":
        activation.enable()
        # After enable(), which says so if this torch is not supported.
        from dynamo_dist.torch_compat import dynamo_compiler

        dynamo_compiler.forget_backend(name)
        return compile_graph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., object]:
    """Compile one Dynamo graph: Inductor with our passes, by configuration of this compile alone.

    ``mode`` means what it means for ``backend="inductor"``; ``options`` are ours
    (``inductor_passes.PassOptions``) and any of Inductor's. Raises OptionError, naming the known
    ones, for an option or a pass that neither knows.
    """
    # Torch's compiler; Dynamo loads this module where it only lists backends.
    from dynamo_dist import graph_compile
    from inductor_passes.pass_options import split

    graph_compile.register_options()
    # An unknown option is an error before anything is done.
    own, inductor = split(options or {}, mode)
    return graph_compile.compile_frame(gm, example_inputs, own, inductor)
