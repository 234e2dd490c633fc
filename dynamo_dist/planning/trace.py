"""The place where a plan takes effect: between DTensor and its dispatcher, while AOTAutograd
traces.

A plan says where the inputs of each operation go before it runs. It is carried out by
redistributing them and then letting DTensor run the operation by its own rules, which find nothing
left to move. So whatever a plan says, the numbers are those of DTensor's strategies; a bad plan
costs time only. Seen from here forward and backward are one sequence of operations on global
shapes, the same in every trace whatever the placements; inserting redistributes in the Dynamo graph
would reach neither the backward nor the operations that a torch function is made of.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from dynamo_dist.errors import PlanError
from dynamo_dist.program import Choice, Program, Ref, Source, Spec, Step
from dynamo_dist.torch_compat import dtensor_placements, dtensor_planning
from dynamo_dist.torch_compat.patching import applied

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._ops import OpOverload

_session: Session | None = None


def enter(*tensors: object) -> tuple[object, ...]:
    """The graph's DTensor inputs as the graph begins: where they lie, their gradients must come
    to lie.
    """
    if _session is not None:
        _session.begin(tensors)
    return tuple(
        t.redistribute(placements=t.placements) if isinstance(t, DTensor) and t.requires_grad else t
        for t in tensors
    )


def leave(*tensors: object) -> tuple[object, ...]:
    """The graph's DTensor outputs as it ends: they come to lie where upstream would leave them."""
    left = tuple(
        t.redistribute(placements=t.placements) if isinstance(t, DTensor) else t for t in tensors
    )
    if _session is not None:
        _session.left = True
    return left


def bracketed(gm: fx.GraphModule, inputs: Sequence[object]) -> fx.GraphModule:
    """A copy of a Dynamo graph that calls ``enter`` first and ``leave`` last."""
    graph = fx.Graph()
    outputs = graph.graph_copy(gm.graph, {})
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    spread = [
        node for node, given in zip(placeholders, inputs, strict=True) if isinstance(given, DTensor)
    ]
    with graph.inserting_after(placeholders[-1]):
        entered = graph.call_function(enter, tuple(spread))
    last = entered
    for i, node in enumerate(spread):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (entered, i))
        last.meta.update(node.meta)
        node.replace_all_uses_with(last, delete_user_cb=lambda user: user is not entered)
    leaves = [node for node in pytree.tree_leaves(outputs) if isinstance(node, fx.Node)]
    renamed = dict(zip(spread, _items(entered), strict=True))
    unique = list(dict.fromkeys(renamed.get(node, node) for node in leaves))
    left = graph.call_function(leave, tuple(unique))
    items = {
        node: graph.call_function(operator.getitem, (left, i)) for i, node in enumerate(unique)
    }
    graph.output(fx.node.map_arg(outputs, lambda node: items[renamed.get(node, node)]))
    copied = fx.GraphModule(gm, graph)
    copied.meta.update(gm.meta)
    return copied


def _items(entered: fx.Node) -> list[fx.Node]:
    found = [user for user in entered.users if user.target is operator.getitem]
    return sorted(found, key=lambda node: int(node.args[1]))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Line:
    """One step of a plan: what it is, where its inputs go before it runs, and its outputs come
    to lie.
    """

    text: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]

    def choice(self) -> Choice:
        """Return the choice among the operation's strategies that the line stands for."""
        return Choice(self.inputs, self.outputs)


def rendered(args: Any, kwargs: Any) -> str:
    """Arguments as text, a star for each DTensor: ``(*, [*, *], 1)``."""

    def one(arg: object) -> str:
        if isinstance(arg, DTensor):
            return "*"
        if isinstance(arg, torch.Tensor):
            return f"tensor{list(arg.shape)}"
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(map(one, arg))}]"
        return str(arg)

    named = (f"{name}={one(arg)}" for name, arg in kwargs.items())
    return f"({', '.join([*map(one, args), *named])})"


class Session:
    """One trace: recorded, or carried out by ``script``, a line for each step."""

    def __init__(self, script: Sequence[Line] | None = None) -> None:
        self.script = script
        self.answers: dict[object, tuple[Any, Choice | None]] = {}
        self.hook = dtensor_planning.Interception(
            self.on_op, self.on_move, self.on_back, self.on_local
        )
        self.begin(())

    def begin(self, inputs: Sequence[object]) -> None:
        """Forget the last trace: AOTAutograd makes several, and the last is the whole one."""
        self.program = Program()
        self.schemas: list[object] = []
        self.meshes: list[DeviceMesh] = []
        self.refs: dict[int, tuple[Ref, object]] = {}
        self.depth = 0
        self.left = False
        self.stray: str | None = None
        for tensor in inputs:
            if isinstance(tensor, DTensor):
                self._source(tensor, is_input=True)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Intercept what DTensor does in this block."""
        global _session  # noqa: PLW0603 - one trace at a time: torch's compile lock is held
        before, _session = _session, self
        try:
            with applied(self.hook):
                yield
        finally:
            _session = before

    # --- what is intercepted

    def on_op(self, op: OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        flat, tree = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in flat if isinstance(leaf, DTensor)]
        if self.depth or not tensors:
            return self.hook.upstream(op, args, kwargs)
        others = [leaf for leaf in flat if not isinstance(leaf, DTensor)]
        text = f"{op}{rendered(args, kwargs)}"
        mutable = bool(op._schema.is_mutable)
        fixed = (
            self.hook.has_own_rules(op)
            or dtensor_planning.is_random(op)
            or any(isinstance(leaf, torch.Tensor) for leaf in others)
            or any(t.device_mesh != tensors[0].device_mesh for t in tensors)
        )
        if self._strays(text, tensors):
            return self.hook.upstream(op, args, kwargs)
        with self._inside():
            index, inputs, planned = self._begin_step(text, tensors)
            if planned is not None:
                given = iter(
                    [dtensor_planning.moved(t, s) for t, s in zip(tensors, planned, strict=True)]
                )
                flat = [next(given) if isinstance(leaf, DTensor) else leaf for leaf in flat]
                args, kwargs = pytree.tree_unflatten(flat, tree)
            schema = choice = None
            if self.script is None and not self.hook.has_own_rules(op):
                schema, choice = self._answer(op, text, args, kwargs, tensors)
            with dtensor_planning.steered(
                None if self.script is None else self.script[index].choice()
            ):
                result = self.hook.upstream(op, args, kwargs)
        outputs = result if isinstance(result, (list, tuple)) else [result]
        here = tuple(dtensor_placements.words(t.placements) for t in tensors)
        self._end_step(
            index,
            Step(
                "op",
                text,
                inputs,
                tuple(
                    dtensor_placements.planned_value(o) if isinstance(o, DTensor) else None
                    for o in outputs
                ),
                choice.inputs if choice is not None else here,
                tuple(
                    dtensor_placements.words(o.placements) if isinstance(o, DTensor) else None
                    for o in outputs
                ),
                self._mesh(tensors[0].device_mesh),
                fixed=fixed or choice is None,
                in_place=mutable,
            ),
            outputs,
            schema,
        )
        return result

    def on_move(
        self,
        upstream: Callable[..., object],
        ctx: Any,
        tensor: Any,
        mesh: Any,
        placements: Any,
        *rest: object,
    ) -> object:
        target = dtensor_placements.words(placements)
        if self.depth or tensor.device_mesh != mesh or self._strays("redistribute", [tensor]):
            return upstream(ctx, tensor, mesh, placements, *rest)
        with self._inside():
            index, inputs, planned = self._begin_step("redistribute", [tensor])
            if planned is not None:
                target = planned[0]
            goal = tuple(dtensor_placements.placement(text) for text in target)
            result = upstream(ctx, tensor, mesh, goal, *rest)
        self._moved(index, "redistribute", tensor, inputs, result, target, fixed=True)
        # Where an input of the graph enters, its gradient must come back to where it lies.
        ctx.dynamo_dist_pinned = (
            self._is_input(inputs[0]) and dtensor_placements.words(tensor.placements) == target
        )
        return result

    def on_back(self, upstream: Any, ctx: Any, gradient: Any) -> object:
        if self.depth or not isinstance(gradient, DTensor):
            return upstream(ctx, gradient)
        pinned = bool(getattr(ctx, "dynamo_dist_pinned", False))
        if self._strays(f"back pinned={pinned}", [gradient]):
            return upstream(ctx, gradient)
        with self._inside():
            index, inputs, planned = self._begin_step(f"back pinned={pinned}", [gradient])
            if planned is not None:
                dtensor_planning.set_backward_target(ctx, planned[0])
            results = upstream(ctx, gradient)
        target = dtensor_placements.words(results[0].placements)
        self._moved(index, "back", gradient, inputs, results[0], target, fixed=pinned)
        return results

    def on_local(
        self, upstream: Callable[..., object], ctx: object, tensor: Any, *rest: object
    ) -> object:
        if self.depth or self._strays("to_local", [tensor]):
            return upstream(ctx, tensor, *rest)
        with self._inside():
            index, inputs, planned = self._begin_step("to_local", [tensor])
            here = tensor if planned is None else dtensor_planning.moved(tensor, planned[0])
            result = upstream(ctx, here, *rest)
        spec = dtensor_placements.words(here.placements)
        self._end_step(
            index,
            Step(
                "local", "to_local", inputs, (), (spec,), (), self._mesh(tensor.device_mesh), True
            ),
            [],
            None,
        )
        return result

    # --- bookkeeping

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def _answer(
        self, op: object, text: str, args: Any, kwargs: Any, tensors: Sequence[Any]
    ) -> tuple[Any, Choice | None]:
        """The op as DTensor's rules see it, and what they say; asked once for equal ones."""
        key = (
            text,
            tuple(
                (dtensor_placements.planned_value(t), t.placements, t.device_mesh) for t in tensors
            ),
        )
        if key not in self.answers:
            schema = dtensor_planning.schema_of(op, args, kwargs)
            self.answers[key] = schema, dtensor_planning.propagated(schema)
        return self.answers[key]

    def _begin_step(
        self, text: str, tensors: Sequence[Any]
    ) -> tuple[int, tuple[Ref, ...], tuple[Spec, ...] | None]:
        """Number the next step; where a plan is carried out, where its inputs go."""
        index = len(self.program.steps)
        inputs = tuple(self._ref(tensor) for tensor in tensors)
        if self.script is None:
            return index, inputs, None
        if not self._fits(text, tensors):
            raise self._unfit(text)
        planned = self.script[index].inputs
        for tensor, spec in zip(tensors, planned, strict=True):
            if not dtensor_placements.can_lie(tensor, spec):
                raise PlanError(
                    f"The plan puts an input of operation {index}, {text!r}, at "
                    f"{' | '.join(spec)!r}.",
                    f"It has {tensor.ndim} dimensions, its mesh {tensor.device_mesh.ndim}.",
                    "Correct the plan file, or delete it to plan anew.",
                )
        return index, inputs, planned

    def _fits(self, text: str, tensors: Sequence[object]) -> bool:
        """Return whether the plan's next line is this step."""
        assert self.script is not None
        index = len(self.program.steps)
        line = self.script[index] if index < len(self.script) else None
        return line is not None and line.text == text and len(line.inputs) == len(tensors)

    def _strays(self, text: str, tensors: Sequence[object]) -> bool:
        """Return whether this is what AOTAutograd does with the outputs in a trace that has no
        backward.
        """
        if self.script is None or not self.left or self._fits(text, tensors):
            return False
        self.stray = self.stray or text
        return True

    def _unfit(self, text: str) -> PlanError:
        assert self.script is not None
        index = len(self.program.steps)
        expected = repr(self.script[index].text) if index < len(self.script) else "no more of them"
        return PlanError(
            f"The plan does not fit the program: operation {index} is {text!r}, and the plan "
            f"expects {expected}.",
            "The program, or the file, has changed since it was planned.",
            "Delete the plan file to plan anew.",
        )

    def check_complete(self) -> None:
        """Raise PlanError if the last trace ended before the plan did. No trace at all is a
        cache hit.
        """
        if self.script is not None and self.program.steps and self.stray is not None:
            raise self._unfit(self.stray)

    def _end_step(self, index: int, step: Step, outputs: Sequence[Any], schema: object) -> None:
        self.program.steps.append(step)
        self.schemas.append(schema)
        for i, output in enumerate(outputs):
            if isinstance(output, DTensor):
                self.refs[id(output)] = Ref(index, i), output

    def _moved(
        self,
        index: int,
        kind: str,
        tensor: Any,
        inputs: tuple[Ref, ...],
        result: Any,
        target: Spec,
        *,
        fixed: bool,
    ) -> None:
        text = "redistribute" if kind == "redistribute" else f"back pinned={fixed}"
        step = Step(
            kind,
            text,
            inputs,
            (dtensor_placements.planned_value(result),),
            (target,),
            (target,),
            self._mesh(tensor.device_mesh),
            fixed,
        )
        self._end_step(index, step, [result], None)

    def _ref(self, tensor: torch.Tensor) -> Ref:
        entry = self.refs.get(id(tensor))
        return entry[0] if entry is not None else self._source(tensor, is_input=False)

    def _source(self, tensor: Any, *, is_input: bool) -> Ref:
        spec = dtensor_placements.words(tensor.placements)
        self.program.sources.append(
            Source(dtensor_placements.planned_value(tensor), spec, is_input)
        )
        ref = Ref(-len(self.program.sources))
        self.refs[id(tensor)] = ref, tensor
        return ref

    def _is_input(self, ref: Ref) -> bool:
        return ref.step < 0 and self.program.sources[-1 - ref.step].is_input

    def _mesh(self, mesh: DeviceMesh) -> int:
        for i, recorded in enumerate(self.meshes):
            if recorded is mesh or recorded == mesh:
                return i
        self.meshes.append(mesh)
        return len(self.meshes) - 1
