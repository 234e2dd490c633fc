"""The placements that each operation can run on, asked of DTensor itself.

An operation is offered placements along one mesh dimension, and every strategy that DTensor then
weighs is a choice: the same lists, in the same place, from which a plan is carried out. So
registered, corrected and third parties' strategies all count, and a strategy that DTensor lacks is
not planned with. Mesh dimensions are independent in DTensor's rules: choices on a mesh are the
products.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.planning.cost import shard_dim
from dynamo_dist.program import Choice, MeshInfo, Program, Spec, Step, Value, upstream_choice
from dynamo_dist.torch_compat import dtensor_planning

# Operations on more tensors than this are offered one placement at a time, and the same to all.
MAX_OFFERS = 150
# One word for each input and output.
_Line = tuple[tuple[str, ...], tuple[str | None, ...]]


class Strategies:
    """Choices of the steps of one program; equal steps share them."""

    def __init__(
        self, program: Program, schemas: Sequence[object], meshes: Sequence[DeviceMesh]
    ) -> None:
        self.program = program
        self.schemas = schemas
        self.meshes = meshes
        self._lines: dict[tuple[str, int], DeviceMesh] = {}
        self._on_line: dict[object, list[_Line]] = {}
        self._on_mesh: dict[object, list[Choice]] = {}

    def of(self, index: int) -> list[Choice]:
        """List the choices of step ``index``; upstream's comes first."""
        step = self.program.steps[index]
        upstream = upstream_choice(step)
        if step.fixed or step.kind in ("redistribute", "local"):
            return [upstream]
        values = tuple(self.program.value(ref) for ref in step.inputs)
        mesh = self.program.meshes[step.mesh]
        if step.kind == "back":
            return _first(upstream, [Choice((s,), (s,)) for s in _specs(values[0], mesh)])
        key = (step.text, values, step.mesh)
        if key not in self._on_mesh:
            self._on_mesh[key] = list(self._products(index, values, mesh))
        return _first(upstream, self._on_mesh[key])

    def accepts(self, index: int, choice: Choice) -> bool:
        """Return whether DTensor, given the inputs of ``choice`` on the real mesh, moves nothing
        and agrees.
        """
        step = self.program.steps[index]
        if step.kind != "op" or choice == upstream_choice(step):
            return True
        schema = dtensor_planning.with_specs(
            self.schemas[index], self.meshes[step.mesh], choice.inputs
        )
        with dtensor_planning.steered(choice):
            return dtensor_planning.propagated(schema) == choice

    def _products(self, index: int, values: tuple[Value, ...], mesh: MeshInfo) -> Iterator[Choice]:
        step = self.program.steps[index]
        lines = [self._line(index, values, size) for size in mesh.shape]
        for combination in itertools.product(*lines):
            inputs = tuple(zip(*(inputs for inputs, _ in combination), strict=True))
            outputs = tuple(
                None if words[0] is None else words
                for words in zip(*(outputs for _, outputs in combination), strict=True)
            )
            choice = Choice(inputs, outputs)
            if _divides(choice, values, step, mesh) and (
                not step.in_place or choice.inputs[0] == choice.outputs[0]
            ):
                yield choice

    def _line(self, index: int, values: tuple[Value, ...], size: int) -> list[_Line]:
        """Choices on a mesh of one dimension."""
        step, schema = self.program.steps[index], self.schemas[index]
        key = (step.text, values, size)
        if key in self._on_line:
            return self._on_line[key]
        kind = self.meshes[step.mesh].device_type
        line = self._lines.setdefault((kind, size), dtensor_planning.line_mesh(kind, size))
        found: dict[Choice, None] = {}
        info = MeshInfo((size,), (tuple(range(size)),), size)
        with dtensor_planning.known_outputs(dtensor_planning.output_metas(schema)):
            for offer in _offers([_specs(value, info) for value in values]):
                asked = dtensor_planning.with_specs(schema, line, offer)
                for answer in dtensor_planning.offered(asked, len(values), len(step.outputs)):
                    if _is_plain(answer) and _fits(answer, step, values, info):
                        found[answer] = None
        choices = [
            (
                tuple(spec[0] for spec in c.inputs),
                tuple(None if spec is None else spec[0] for spec in c.outputs),
            )
            for c in found
        ]
        self._on_line[key] = choices
        return choices


def _first(upstream: Choice, others: list[Choice]) -> list[Choice]:
    return [upstream, *(choice for choice in others if choice != upstream)]


def _specs(value: Value, mesh: MeshInfo) -> list[Spec]:
    """Every spec that a tensor may have: even shards, sums of numbers that can be added."""
    per_dim = []
    for size in mesh.shape:
        words = ["R", *(f"S{d}" for d, length in enumerate(value.shape) if length % size == 0)]
        if value.dtype.startswith(("float", "bfloat", "complex")):
            words.append("P")
        per_dim.append(words)
    return [spec for spec in itertools.product(*per_dim) if _even(value, spec, mesh)]


def _even(value: Value, spec: Spec, mesh: MeshInfo) -> bool:
    shape = list(value.shape)
    for word, size in zip(spec, mesh.shape, strict=True):
        dim = shard_dim(word)
        if dim is not None:
            if dim >= len(shape) or shape[dim] % size or shape[dim] == 0:
                return False
            shape[dim] //= size
    return True


def _divides(choice: Choice, values: Sequence[Value], step: Step, mesh: MeshInfo) -> bool:
    pairs = [
        *zip(values, choice.inputs, strict=True),
        *zip(step.outputs, choice.outputs, strict=True),
    ]
    return all(v is None or s is None or _even(v, s, mesh) for v, s in pairs)


def _fits(choice: Choice, step: Step, values: Sequence[Value], mesh: MeshInfo) -> bool:
    if len(choice.inputs) != len(values) or len(choice.outputs) != len(step.outputs):
        return False
    made = [spec is None for spec in choice.outputs] == [v is None for v in step.outputs]
    return made and _divides(choice, values, step, mesh)


def _is_plain(choice: Choice) -> bool:
    words = [spec[0] for spec in (*choice.inputs, *choice.outputs) if spec is not None]
    return all(word in ("R", "P") or shard_dim(word) is not None for word in words)


def _offers(candidates: Sequence[Sequence[Spec]]) -> Iterator[tuple[Spec, ...]]:
    """Yield candidate specs for all inputs together: every combination where they are few.

    Else yield all replicated, each spec of one input beside replicated others, and each spec on
    every input that has it.
    """
    if math.prod(map(len, candidates)) <= MAX_OFFERS:
        yield from itertools.product(*candidates)
        return
    whole = tuple(("R",) for _ in candidates)
    yield whole
    for i, own in enumerate(candidates):
        for spec in own:
            yield (*whole[:i], spec, *whole[i + 1 :])
    for spec in dict.fromkeys(s for own in candidates for s in own):
        yield tuple(spec if spec in own else ("R",) for own in candidates)
