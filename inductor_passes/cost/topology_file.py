"""The form of a topology's JSON: every mistake in a file names file, field, value and the fix.

A file is one object::

    {"name": "...", "description": "...", "ranks_per_node": FIGURE,
     "device": {"matmul": {DTYPE: {"peak_tflops": FIGURE, "efficiency": FIGURE}, ...},
                "attention_efficiency": FIGURE, "memory_gb_per_s": FIGURE, "kernel_us": FIGURE,
                "compute_stretch": FIGURE, "launching_us": FIGURE,
                "measured_products": [{"dtype": "bfloat16", "source": "...",
                                       "points": [[BATCH, M, K, N, MICROSECONDS], ...]}, ...]},
     "links": {"intra_node_gb_per_s": FIGURE, "inter_node_gb_per_s": FIGURE,
               "protocols": [{"name": "...", "launch_us": FIGURE,
                              "intra_node": {"step_us": FIGURE, "bandwidth_share": FIGURE},
                              "inter_node": {"step_us": FIGURE, "bandwidth_share": FIGURE}}, ...],
               "all_reduce_in_node": {"launch_us": FIGURE, "gb_per_s": FIGURE},
               "coalesced_start_share": FIGURE, "reduce_scatter_rounds": FIGURE,
               "measured": [{"kind": "all_gather", "ranks": 8, "nodes": 1, "source": "...",
                             "points": [[PAYLOAD_BYTES, MICROSECONDS], ...]}, ...]}}

where FIGURE is ``{"value": NUMBER, "source": "where the number is from"}``; ``compute_stretch``, ``launching_us``,
``all_reduce_in_node``, ``coalesced_start_share``, ``reduce_scatter_rounds`` and both lists of what was measured may be left out. A payload is one rank's
input. ``data/cpu-gloo.json`` is a short one to start from; ``python -m inductor_passes costs import``
adds measurements to one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from inductor_passes.errors import TopologyError
from inductor_passes.files import Form

_TEXT = {"type": "string", "pattern": "\\S"}
_WHOLE = {"type": "integer", "minimum": 1}
_ABOVE_ZERO = {"type": "number", "exclusiveMinimum": 0}


def _object(optional: tuple[str, ...] = (), **fields: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional],
        "additionalProperties": False,
    }


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


def _figure(**value: Any) -> dict[str, Any]:
    return _object(value={"type": "number", **value}, source=_TEXT)


def _rows(width: int) -> dict[str, Any]:
    """Rows of whole numbers, each with a time behind them."""
    numbers = [{"type": "integer", "minimum": 0}] * (width - 1)
    size = {"minItems": width, "maxItems": width}
    return _list({"type": "array", "prefixItems": [*numbers, _ABOVE_ZERO], **size})


_RATE, _SHARE = _figure(exclusiveMinimum=0), _figure(exclusiveMinimum=0, maximum=1)
_MULTIPLE = _figure(minimum=1)
_HOP = _object(step_us=_RATE, bandwidth_share=_SHARE)
_RATES = _object(peak_tflops=_RATE, efficiency=_SHARE)
_SCHEMA = _object(
    name=_TEXT,
    description=_TEXT,
    ranks_per_node=_figure(minimum=1, multipleOf=1),
    device=_object(
        ("compute_stretch", "launching_us", "measured_products"),
        matmul={"type": "object", "additionalProperties": _RATES, "required": ["float32"]},
        attention_efficiency=_SHARE,
        memory_gb_per_s=_RATE,
        kernel_us=_RATE,
        compute_stretch=_MULTIPLE,
        launching_us=_RATE,
        measured_products=_list(_object(dtype=_TEXT, source=_TEXT, points=_rows(5))),
    ),
    links=_object(
        ("all_reduce_in_node", "coalesced_start_share", "reduce_scatter_rounds", "measured"),
        intra_node_gb_per_s=_RATE,
        inter_node_gb_per_s=_RATE,
        protocols=_list(_object(name=_TEXT, launch_us=_RATE, intra_node=_HOP, inter_node=_HOP)),
        all_reduce_in_node=_object(launch_us=_RATE, gb_per_s=_RATE),
        coalesced_start_share=_SHARE,
        reduce_scatter_rounds=_MULTIPLE,
        measured=_list(
            _object(kind=_TEXT, ranks=_WHOLE, nodes=_WHOLE, source=_TEXT, points=_rows(2))
        ),
    ),
)


def form(fix: str) -> Form:
    """The format, for the reader of all formats."""
    return Form("topology", TopologyError, fix, _SCHEMA)


def sources_of(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and source of every figure and list of measurements."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from sources_of(item, f"{path}[{index}]")
    elif isinstance(data, dict):
        if "source" in data:
            yield path, data["source"]
        for name, item in data.items():
            yield from sources_of(item, f"{path}.{name}" if path else name)


def dump_topology(value: Any, indent: int = 0) -> str:
    """A topology's content as JSON with one line per figure and per row of measurements."""
    pad = "  " * indent
    if isinstance(value, dict) and set(value) != {"value", "source"}:
        items = [
            f"{pad}  {json.dumps(k)}: {dump_topology(v, indent + 1)}" for k, v in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [f"{pad}  {dump_topology(item, indent + 1)}" for item in value]
        return "[\n" + ",\n".join(items) + f"\n{pad}]"
    return json.dumps(value)
