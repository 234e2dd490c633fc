"""Measurements as a topology file's content; what was not measured comes from another topology and says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from inductor_passes.machine.importing.measurements import Measurements
from inductor_passes.machine.measure.device import DeviceTimes
from inductor_passes.machine.measure.fit import across_nodes, all_reduce_within_node, within_node
from inductor_passes.machine.measure.links import LinkTimes
from inductor_passes.machine.topology.topology import topology_text

_REACHED = "by definition: the rate given is what was reached"


def topology_of(
    base: str, *, name: str, where: str, device: DeviceTimes | None, links: LinkTimes | None
) -> dict[str, Any]:
    """The content of a topology file, without tables: ``tables_of`` has these, for ``add_to``.

    ``base``: the topology, by name or path, that what was not measured is taken from. ``where``: the machine
    and when, for every source. Raises TopologyError if there is no ``base``.
    """
    content: dict[str, Any] = json.loads(topology_text(base))
    _borrow(content, f"not measured here, taken from topology {content['name']!r}: ")
    content["name"] = name
    content["description"] = f"Measured on {where}."
    if device is not None:
        _set_device(content["device"], device, f"measured, {device.how} sample, {where}")
    if links is not None:
        _set_links(content, links, f"measured, {links.how} sample, {where}")
    return content


def tables_of(where: str, device: DeviceTimes | None, links: LinkTimes | None) -> Measurements:
    """Every time by payload or shape, as a topology file keeps them."""
    found = Measurements(source=f"measured, {where}")
    if device is not None:
        for dtype, products in device.products.items():
            found.products[dtype] = {shape: _short(us) for shape, us in products.items()}
    if links is not None:
        for (kind, group), points in links.tables.items():
            times = {payload: _short(us) for payload, us in points.items()}
            found.collectives[kind, group.size, group.nodes] = times
    return found


def _short(value: float) -> float:
    """Four digits: no clock tells more."""
    return float(f"{value:.4g}")


def _borrow(section: dict[str, Any], prefix: str) -> None:
    """Say of every figure and table that it comes from elsewhere."""
    for key, value in section.items():
        if key == "source":
            section[key] = prefix + value
        elif isinstance(value, dict):
            _borrow(value, prefix)
        elif isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict):
                    _borrow(entry, prefix)


def _figure(value: float, source: str) -> dict[str, Any]:
    return {
        "value": value if isinstance(value, int) else _short(value),
        "source": source,
    }


def _set_device(section: dict[str, Any], times: DeviceTimes, how: str) -> None:
    for dtype in times.products:
        rate, shape = times.tflops(dtype)
        section["matmul"][dtype] = {
            "peak_tflops": _figure(rate, f"{how}: best of the products measured, {_text(shape)}"),
            "efficiency": _figure(1, "the peak given is a measured rate"),
        }
    _drop(section, "measured_products", lambda entry: entry["dtype"] in times.products)
    peak, _ = times.tflops(times.attention_dtype)
    share = times.attention_flops / times.attention_us / 1e6 / peak
    section["attention_efficiency"] = _figure(
        min(1.0, share),
        f"{how}: attention in {times.attention_dtype}, over the product's best rate",
    )
    section["memory_gb_per_s"] = _figure(
        2 * times.copy_bytes / times.copy_us / 1e3,
        f"{how}: copy of {times.copy_bytes >> 20} MiB, reads plus writes",
    )
    section["kernel_us"] = _figure(times.kernel_us, f"{how}: add of 16 elements, many in a row")


def _set_links(content: dict[str, Any], times: LinkTimes, how: str) -> None:
    section, layout = content["links"], times.layout
    inside, reduction = within_node(times), all_reduce_within_node(times)
    outside = across_nodes(times, None if inside is None else inside.start_us)
    # Of one CPU host nobody knows how many ranks a job would put there; GPUs are counted.
    if outside is not None or times.device_type != "cpu":
        source = f"{how}: ranks that share a host"
        content["ranks_per_node"] = _figure(layout.per_node, source)
    # Of the ways in which the base drives a link, the one that reaches most stands in for what is not measured.
    borrowed = max(section["protocols"], key=lambda p: p["inter_node"]["bandwidth_share"]["value"])
    protocol = {**borrowed, "name": "measured"}
    for fit, node, rate in (
        (outside, "inter_node", "inter_node_gb_per_s"),
        (inside, "intra_node", "intra_node_gb_per_s"),
    ):
        if fit is None:
            continue
        small = f"{how}: smallest all_gather and all_reduce"
        section[rate] = _figure(fit.gb_per_s, f"{how}: all_gather, smallest to largest payload")
        protocol["launch_us"] = _figure(fit.start_us, small)
        protocol[node] = {
            "step_us": _figure(fit.step_us, small),
            "bandwidth_share": _figure(1, _REACHED),
        }
    section["protocols"] = [protocol]
    if reduction is not None:
        section["all_reduce_in_node"] = {
            "launch_us": _figure(reduction.start_us, f"{how}: smallest all_reduce"),
            "gb_per_s": _figure(
                reduction.gb_per_s, f"{how}: all_reduce, smallest to largest payload"
            ),
        }
    if times.stretch is not None:
        content["device"]["compute_stretch"] = _figure(
            times.stretch, f"{how}: products alone, and beside a collective of all ranks"
        )
    if times.launching_us is not None:
        content["device"]["launching_us"] = _figure(
            times.launching_us, f"{how}: processor time of the smallest collective"
        )
    mine = {(kind, shape.size, shape.nodes) for kind, shape in times.tables}
    _drop(section, "measured", lambda e: (e["kind"], e["ranks"], e["nodes"]) in mine)


def _drop(section: dict[str, Any], name: str, is_measured: Callable[[Any], bool]) -> None:
    """Drop the base's tables of what was measured; no table at all where none is left, as a file may not be empty."""
    kept = [entry for entry in section.pop(name, []) if not is_measured(entry)]
    if kept:
        section[name] = kept


def _text(shape: tuple[int, int, int, int]) -> str:
    b, m, k, n = shape
    return f"{f'{b} of ' if b > 1 else ''}[{m}, {k}] x [{k}, {n}]"
