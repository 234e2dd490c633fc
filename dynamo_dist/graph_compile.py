"""Compile one Dynamo graph, for our backend or for ``enable(inductor=True)``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from dynamo_dist import plugins
from dynamo_dist.runtime import calls
from dynamo_dist.runtime.calls import BELOW_AUTOGRAD, merge_inputs
from dynamo_dist.runtime.gradients import DIRECT_GRADIENTS
from dynamo_dist.runtime.guards import lighten
from dynamo_dist.torch_compat import aot_partition, inductor_code, inductor_cpp
from dynamo_dist.torch_compat.patching import Made, Patch
from inductor_passes.graph.printing import add_library
from inductor_passes.torch_compat import meshes, rank_reads

if TYPE_CHECKING:
    from inductor_passes.pass_options import PassOptions

_OWNER = "dynamo_dist"
_taken: Mapping[str, object] | None = None


def checked(options: Mapping[str, object]) -> Mapping[str, object]:
    """Options for all compiles by ``backend="inductor"``. Raises OptionError for one that is not
    ours, TopologyError.
    """
    if not options:
        return {}

    # Here and below: it loads all passes, which enabling alone does without.
    from inductor_passes.inductor import installed

    register_options()
    return installed.checked(options, "enable(inductor=...)")


def taken() -> Mapping[str, Any] | None:
    """Return the options with which compiles by ``backend="inductor"`` are ours; None if they
    are not.
    """
    return _taken


def restore(options: Mapping[str, object] | None) -> None:
    """Let ``backend="inductor"`` be as ``taken()`` said."""
    if options != taken():
        _take(options)


def taking(options: Mapping[str, object]) -> Patch:
    """Return the patch that has our compiler compile the graphs of ``backend="inductor"``.

    ``options`` apply to compiles that are given no others. The class and the function registered
    under that name, seen in 2.13 to 2.15, ask us.
    """
    return _Taking(options)


class _Taking(Made):
    def __init__(self, options: Mapping[str, object]) -> None:
        from inductor_passes.torch_compat.backend import PLACES

        self.options, self.of = options, PLACES

    def apply(self) -> None:
        self.before = taken()
        _take(self.options)

    def undo(self) -> None:
        _take(self.before)


def _take(options: Mapping[str, object] | None) -> None:
    global _taken  # noqa: PLW0603 - what is taken is one thing of the process
    from inductor_passes.inductor import installed

    register_options()
    part = None if options is None else installed.Part(options, compile_frame)
    installed.put(_OWNER, part)
    _taken = options


def notice_reads() -> None:
    """Let shared compiles take this package's functions and operators for known ones."""
    rank_reads.notice_reads_of("dynamo_dist", "dynamo_dist", "dynamo_dist_parallel")


def register_options() -> None:
    """Let options take what this package and its plugins do beside the passes."""
    from inductor_passes.pass_options import register_switch

    plugins.read_plugins()
    plugins.read_features()
    register_switch(DIRECT_GRADIENTS)
    register_switch(BELOW_AUTOGRAD)


def patches() -> list[Patch]:
    """List changes to torch's compile caches: keys by content, fewer headers."""
    return [
        *inductor_code.meshes_by_content(meshes.content),
        *inductor_code.sources_by_name(),
        *inductor_cpp.only_for_builds(),
    ]


def compile_frame(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    own: PassOptions,
    inductor: Mapping[str, object],
    region: str | None = None,
) -> Callable[..., object]:
    """Compile a graph by configuration of this compile alone: our options and Inductor's.

    ``region``: the compile's name in torch's logs.
    """
    add_library(__file__)  # this package's functions are traced in the place of torch's
    calls.check(gm)
    example_inputs = merge_inputs(gm, example_inputs, lighten())

    from inductor_passes.inductor.session import CompileSession

    def compile_(gm: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        session = CompileSession(gm, own, inductor, region=region, traits=_traits(own))
        return session.run(gm, inputs)

    whole: plugins.Compile = compile_
    for compiler in plugins.frame_compilers:
        whole = _around(compiler, whole, own)
    with aot_partition.recomputing_in_our_pass(gm):
        return whole(gm, example_inputs)


def _around(
    compiler: plugins.FrameCompiler, inner: plugins.Compile, own: PassOptions
) -> plugins.Compile:
    return lambda gm, inputs: compiler.compile(gm, inputs, inner, own)


def _traits(own: PassOptions) -> frozenset[str]:
    """What this package makes code with, unless it is switched off."""
    traits = {BELOW_AUTOGRAD} if own.exact else {BELOW_AUTOGRAD, DIRECT_GRADIENTS}
    return frozenset(traits - set(own.disable))
