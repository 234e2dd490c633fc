"""Plans as files: to read, to edit, to pin, and to find again.

A file holds one JSON object; ``plans`` maps the fingerprint of a graph to its plan. A step stands
on a line: the operation, where upstream puts its inputs, where the plan puts them. To change a
plan, edit ``inputs``; a file that is there is followed as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from filelock import FileLock

from dynamo_dist.diagnostics.records import PlannedStep, PlanRecord
from dynamo_dist.errors import PlanError
from dynamo_dist.planning.planner import Plan
from dynamo_dist.planning.trace import Line
from dynamo_dist.program import Spec
from inductor_passes import files
from inductor_passes.files import write_whole

SCHEMA = 1
# As dynamo_dist/program.py has them; what DTensor alone knows stands behind a question mark.
_WORD = re.compile(r"R|S[0-9]{1,4}|P[a-z]*|\?.+")
_TEXT = {"type": "string"}
_SPECS = {"type": "array", "items": _TEXT}
_US = {"type": "number", "minimum": 0}
_PAIR = {"type": "array", "items": _US, "minItems": 2, "maxItems": 2}


def _fields(**fields: dict[str, Any]) -> dict[str, object]:
    return {"type": "object", "properties": fields, "required": [*fields]}


FORM = files.Form(
    name="plan",
    error=PlanError,
    fix="Or delete it to plan anew.",
    schema=_fields(
        schema={"const": SCHEMA},
        plans={
            "type": "object",
            "additionalProperties": _fields(
                summary=_fields(method=_TEXT, upstream_us=_PAIR, planned_us=_PAIR, bound_us=_US),
                steps={
                    "type": "array",
                    "items": _fields(
                        op=_TEXT,
                        upstream=_SPECS,
                        inputs=_SPECS,
                        outputs={"type": "array", "items": {"type": ["string", "null"]}},
                    ),
                },
            ),
        },
    ),
)


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One step as a file shows it."""

    text: str
    upstream: tuple[Spec, ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec | None, ...]


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan without the program it was made from. Times are modelled, in microseconds.

    ``source``: the file that it was read from, "" for one that is made now.
    """

    rows: tuple[PlanRow, ...]
    upstream_us: tuple[float, float]
    planned_us: tuple[float, float]
    bound_us: float
    method: str
    source: str = field(default="", compare=False)

    @classmethod
    def of(cls, plan: Plan) -> StoredPlan:
        """Return the part of a plan that is kept."""
        rows = tuple(
            PlanRow(step.text, step.upstream_inputs, choice.inputs, choice.outputs)
            for step, choice in zip(plan.program.steps, plan.choices, strict=True)
        )
        return cls(rows, plan.upstream_us, plan.planned_us, plan.bound_us, plan.method)

    def script(self) -> tuple[Line, ...]:
        """Return the lines that carry the plan out."""
        return tuple(Line(row.text, row.inputs, row.outputs) for row in self.rows)

    @property
    def changes(self) -> int:
        """Steps whose inputs go elsewhere than upstream would bring them."""
        return sum(row.upstream != row.inputs for row in self.rows)

    def record(self, graph: str) -> PlanRecord:
        """Return the record that a report shows of the plan."""
        return PlanRecord(
            graph=graph,
            method=self.method,
            steps=len(self.rows),
            upstream_us=sum(self.upstream_us),
            planned_us=sum(self.planned_us),
            bound_us=self.bound_us,
            source=self.source,
            changes=tuple(
                PlannedStep(
                    row.text,
                    tuple(map(_spec_text, row.upstream)),
                    tuple(map(_spec_text, row.inputs)),
                )
                for row in self.rows
                if row.upstream != row.inputs
            ),
        )


def load_plans(path: str) -> dict[str, StoredPlan]:
    """The plans of a file by fingerprint; none if there is no file.

    Raises PlanError for a file that is no plan.
    """
    if not os.path.exists(path):
        return {}
    plans = files.load(path, FORM)["plans"]
    return {name: _plan(entry, path, ("plans", name)) for name, entry in plans.items()}


def save_plan(path: str, plans: dict[str, StoredPlan]) -> None:
    """Write a file completely or not at all. All ranks make the same plan, so any one may stay."""
    write_whole(path, text_of(plans))


@contextlib.contextmanager
def one_at_a_time(path: str, wait_s: float = 300.0) -> Iterator[None]:
    """Of the processes of a host that would make the file, one does; the others wait and find it
    made.

    One that has waited ``wait_s`` seconds, or that cannot lock in this folder, goes on: a plan that
    is made twice is the same plan.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # filelock's Timeout is one
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            held.enter_context(FileLock(f"{path}.lock").acquire(timeout=wait_s))
        yield


def text_of(plans: dict[str, StoredPlan]) -> str:
    """A file's content: a line a step."""
    parts = []
    for name, plan in plans.items():
        rows = ",\n".join("    " + json.dumps(_row_json(i, row)) for i, row in enumerate(plan.rows))
        head = {
            "method": plan.method,
            "upstream_us": list(plan.upstream_us),
            "planned_us": list(plan.planned_us),
            "bound_us": plan.bound_us,
        }
        parts.append(
            f'  {json.dumps(name)}: {{"summary": {json.dumps(head)}, "steps": [\n{rows}\n  ]}}'
        )
    return f'{{"schema": {SCHEMA}, "plans": {{\n' + ",\n".join(parts) + "\n}}\n"


def _row_json(index: int, row: PlanRow) -> dict[str, object]:
    return {
        "step": index,
        "op": row.text,
        "upstream": [_spec_text(spec) for spec in row.upstream],
        "inputs": [_spec_text(spec) for spec in row.inputs],
        "outputs": [None if spec is None else _spec_text(spec) for spec in row.outputs],
    }


def _plan(entry: dict[str, Any], path: str, at: tuple[str | int, ...]) -> StoredPlan:
    def specs(step: int, key: str) -> Iterator[Spec | None]:
        for place, text in enumerate(entry["steps"][step][key]):
            spec = None if text is None else tuple(text.split(" | "))
            if spec is not None and not all(map(_WORD.fullmatch, spec)):
                where = (*at, "steps", step, key, place)
                raise FORM.wrong(
                    path, where, text, "must be R, S0, P or its like for each mesh dimension"
                )
            yield spec

    def inputs(step: int, key: str) -> tuple[Spec, ...]:
        return tuple(spec for spec in specs(step, key) if spec is not None)

    rows = tuple(
        PlanRow(row["op"], inputs(i, "upstream"), inputs(i, "inputs"), tuple(specs(i, "outputs")))
        for i, row in enumerate(entry["steps"])
    )
    head = entry["summary"]
    upstream, planned = tuple(head["upstream_us"]), tuple(head["planned_us"])
    return StoredPlan(rows, upstream, planned, head["bound_us"], head["method"], path)


def _spec_text(spec: Spec) -> str:
    return " | ".join(spec)
