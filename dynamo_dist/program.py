"""A DTensor program as the planner sees it: steps in the order they run, and what each reads.

Plain data without torch. A *spec* is a tuple of words, one per mesh dimension: ``R`` replicated,
``S0`` sharded on dimension 0, ``P`` partial sums; other placements keep the text that DTensor
prints and are only ever left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Spec = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program; ``shape`` is global."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int


@dataclass(frozen=True, slots=True)
class MeshInfo:
    """Sizes of the mesh's dimensions, and of each the ranks of one group along it."""

    shape: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    world: int


@dataclass(frozen=True, slots=True)
class Ref:
    """Output ``output`` of step ``step``; ``step`` -1 - k is source k."""

    step: int
    output: int = 0


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that no step makes: an input of the graph, a tangent, a DTensor made from a local
    tensor.
    """

    value: Value
    spec: Spec
    is_input: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One operation on DTensors.

    ``kind`` is ``op``; ``redistribute`` (to what the user asked for: ``upstream_outputs``);
    ``back`` (its backward); or ``local`` (the program reads the local tensor: its placement is
    pinned). The upstream specs are what DTensor chose by itself. A ``fixed`` step keeps them.
    ``text`` is all that distinguishes it from other steps besides the tensors it reads: the op and
    its other arguments.
    """

    kind: str
    text: str
    inputs: tuple[Ref, ...]
    outputs: tuple[Value | None, ...]
    upstream_inputs: tuple[Spec, ...]
    upstream_outputs: tuple[Spec | None, ...]
    mesh: int
    fixed: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """The memory traffic of one operation, fused with its neighbours as long as nothing moves
    between them.

    ``reads``, ``writes``: the share of each input that it reads from memory, and of each output
        that it writes there; what stays inside a kernel is neither. ``starts_kernel``: whether one
        starts here.
    ``operations``: floating-point operations on whole tensors, but for matrix products, whose
        shapes say them;
    ``attention``: of a fused attention kernel.
    """

    reads: tuple[float, ...]
    writes: tuple[float, ...]
    starts_kernel: bool = True
    operations: float = 0.0
    attention: bool = False


@dataclass(slots=True)
class Program:
    """All steps of a forward graph and, where it is trained, of its backward.

    ``accesses``: one per step; None for a step whose accesses are unknown, which then reads and
    writes all. Empty for a program without known accesses.
    """

    steps: list[Step] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    meshes: list[MeshInfo] = field(default_factory=list)
    accesses: list[Access | None] = field(default_factory=list)

    def access(self, index: int) -> Access:
        """Return the memory traffic of step ``index``."""
        known = self.accesses[index] if self.accesses else None
        if known is not None:
            return known
        step = self.steps[index]
        return Access((1.0,) * len(step.inputs), (1.0,) * len(step.outputs))

    def value(self, ref: Ref) -> Value:
        """Return the value that ``ref`` names."""
        if ref.step < 0:
            return self.sources[-1 - ref.step].value
        found = self.steps[ref.step].outputs[ref.output]
        assert found is not None
        return found


@dataclass(frozen=True, slots=True)
class Choice:
    """Placements of one step: where its inputs go before it runs, and where its outputs come to
    lie.
    """

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]


def upstream_choice(step: Step) -> Choice:
    """Return the choice that DTensor makes by itself."""
    return Choice(step.upstream_inputs, step.upstream_outputs)
