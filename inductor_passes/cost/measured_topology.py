"""Make a topology's content of measurements, on the ranks of a job; what was not measured says so.

The formulas are those of ``collectives.py``, solved for a link's start, step and rate: a ring of n
ranks takes n - 1 steps for a gather and twice as many for an all-reduce, and its gather moves n - 1
payloads.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)

from inductor_passes.cost.collectives import GroupShape
from inductor_passes.cost.importing import Measurements
from inductor_passes.cost.measure_device import DeviceTimes
from inductor_passes.cost.measure_links import LinkTimes, Points
from inductor_passes.cost.topology import NodeAllReduce, topology_text
from inductor_passes.errors import CalibrationError, PassesError
from inductor_passes.files import JsonObject


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One kind of link: microseconds of a start and of a step, and the rate of a rank's link."""

    start_us: float
    step_us: float
    gb_per_s: float


def within_node(times: LinkTimes) -> LinkFit | None:
    """The link between ranks of one host; None where each host has one rank."""
    ranks = times.layout.per_node
    if ranks < 2:
        return None
    shape = GroupShape(ranks, 1)
    start, step = _start_and_step(times, shape)
    return LinkFit(start, step, (ranks - 1) / _us_per_byte(times.tables["all_gather", shape]) / 1e3)


def all_reduce_within_node(times: LinkTimes) -> NodeAllReduce | None:
    """The same for an all-reduce, which a library may do by other means than a ring."""
    if times.layout.per_node < 2:
        return None
    points = times.tables["all_reduce", GroupShape(times.layout.per_node, 1)]
    return NodeAllReduce(points[min(points)], 1 / _us_per_byte(points) / 1e3)


def across_nodes(times: LinkTimes, start_us: float | None = None) -> LinkFit | None:
    """The link between hosts; None where there is one host.

    Its rate is that of one rank's link, as ranks of a node share the traffic of a ring.
    ``start_us``: the start within a host, where that was measured; the steps take what is left
    then.
    """
    layout = times.layout
    if layout.nodes < 2:
        return None
    alone = GroupShape(layout.nodes, layout.nodes)
    start, step = _start_and_step(times, alone)
    if start_us is not None:
        gather = times.tables["all_gather", alone]
        small = gather[min(gather)]
        start, step = start_us, max(small - start_us, 0.1 * small) / (alone.size - 1)
    everyone = times.tables["all_gather", GroupShape(layout.ranks, layout.nodes)]
    payloads = (layout.ranks - 1) / layout.per_node
    return LinkFit(start, step, payloads / _us_per_byte(everyone) / 1e3)


def _start_and_step(times: LinkTimes, shape: GroupShape) -> tuple[float, float]:
    """Return start and step by the smallest gather and all-reduce, kept within what noise could
    have turned around.
    """
    gather, reduce = (times.tables[kind, shape] for kind in ("all_gather", "all_reduce"))
    small, steps = gather[min(gather)], shape.size - 1
    hops = min(max(reduce[min(reduce)] - small, 0.1 * small), 0.9 * small)
    return small - hops, hops / steps


def _us_per_byte(points: Points) -> float:
    """Microseconds that each further byte of a payload costs."""
    first, last = min(points), max(points)
    slope = (points[last] - points[first]) / max(1, last - first)
    return slope if slope > 0 else points[last] / last


_REACHED = "by definition: the rate given is what was reached"


def topology_of(
    base: str, *, name: str, where: str, device: DeviceTimes | None, links: LinkTimes | None
) -> JsonObject:
    """The content of a topology file, without tables: ``tables_of`` has these, for ``add_to``.

    ``base``: the topology, by name or path, that what was not measured is taken from. ``where``:
    the machine and when, for every source. Raises TopologyError if there is no ``base``.
    """
    content: JsonObject = json.loads(topology_text(base))
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
    """Round to four significant digits, because no clock is more precise."""
    return float(f"{value:.4g}")


def _borrow(section: JsonObject, prefix: str) -> None:
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


def _figure(value: float, source: str) -> JsonObject:
    return {
        "value": value if isinstance(value, int) else _short(value),
        "source": source,
    }


def _set_device(section: JsonObject, times: DeviceTimes, how: str) -> None:
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


def _set_links(content: JsonObject, times: LinkTimes, how: str) -> None:
    section, layout = content["links"], times.layout
    inside, reduction = within_node(times), all_reduce_within_node(times)
    outside = across_nodes(times, None if inside is None else inside.start_us)
    # Of one CPU host nobody knows how many ranks a job would put there; GPUs are counted.
    if outside is not None or times.device_type != "cpu":
        source = f"{how}: ranks that share a host"
        content["ranks_per_node"] = _figure(layout.per_node, source)
    # Of the ways in which the base drives a link, the one that reaches most stands in for what is
    # not measured.
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
            "launch_us": _figure(reduction.launch_us, f"{how}: smallest all_reduce"),
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


def _drop(section: JsonObject, name: str, is_measured: Callable[[Any], bool]) -> None:
    """Drop the base's tables of what was measured; no table at all where none is left, as a file
    may not be empty.
    """
    kept = [entry for entry in section.pop(name, []) if not is_measured(entry)]
    if kept:
        section[name] = kept


def _text(shape: tuple[int, int, int, int]) -> str:
    b, m, k, n = shape
    return f"{f'{b} of ' if b > 1 else ''}[{m}, {k}] x [{k}, {n}]"


CPU_RANKS = 2
SAID_WHY = 1  # exit code of a rank that has printed its error


def is_launched() -> bool:
    """Return whether torchrun, or another launcher with its variables, has started this process
    as one rank.
    """
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def chosen_device(name: str | None) -> str:
    """``cpu`` or ``cuda``: what was asked for, else what there is. Raises CalibrationError
    without CUDA.
    """
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "none: it was built for the CPU"
        raise CalibrationError(
            "There is no CUDA device here.",
            f"torch sees none; its own CUDA is {built}.",
            "Run nvidia-smi, look at CUDA_VISIBLE_DEVICES, or measure with --device cpu.",
        )
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def rank_count(device_type: str, wanted: int | None) -> int:
    """Return how many ranks start here: one per GPU, or two on a CPU. Raises CalibrationError
    for more than GPUs.
    """
    if device_type == "cpu":
        return wanted or CPU_RANKS
    there = torch.cuda.device_count()
    if wanted is not None and wanted > there:
        raise _too_few_gpus(f"{wanted} ranks were asked for", there)
    return wanted or there


def run_ranks(ranks: int, run: Callable[[], None], timeout_s: float, device_type: str) -> int:
    """Run ``run`` on ranks of this host, in processes of their own; 0, or 1 if one failed.

    ``run`` must be picklable. An error of ours is printed by the rank that has it.
    """
    with tempfile.TemporaryDirectory(prefix="calibrate_") as folder:
        arguments = (run, ranks, str(Path(folder) / "store"), timeout_s, device_type)
        try:
            spawn(_rank, arguments, nprocs=ranks)
        except ProcessExitedException as error:
            if error.exit_code != SAID_WHY:
                how = error.signal_name or f"exit code {error.exit_code}"
                print(f"error: rank {error.error_index} is gone ({how}).", file=sys.stderr)
            return 1
        except ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            print(f"error: rank {error.error_index} failed: {last}", file=sys.stderr)
            return 1
    return 0


def _rank(
    rank: int, run: Callable[[], None], ranks: int, store: str, timeout_s: float, device_type: str
) -> None:
    if device_type == "cpu":
        torch.set_num_threads(1)
    if sys.platform == "linux":
        # A host name that does not resolve would stop gloo.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        with inside_job(device_type, timeout_s, rank, ranks, f"file://{store}"):
            run()
    except PassesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(SAID_WHY)


@contextlib.contextmanager
def inside_job(
    device_type: str,
    timeout_s: float,
    rank: int = -1,
    ranks: int = -1,
    init_method: str = "env://",
) -> Iterator[None]:
    """This process as a rank of the job, by the launcher's variables or those given; left
    afterwards.

    Raises CalibrationError without NCCL, where a host has fewer GPUs than ranks, where a rank does
    not come within ``timeout_s``, and where one is lost later.
    """
    backend = "gloo"
    if device_type == "cuda":
        backend = "nccl"
        if not dist.is_nccl_available():
            raise CalibrationError(
                "This torch has no NCCL.",
                "GPUs are joined by it.",
                "Install a build of torch with NCCL, or measure one GPU with --ranks 1.",
            )
        local, there = local_rank(rank), torch.cuda.device_count()
        if local >= there:
            raise _too_few_gpus(f"this is rank {local} of its host", there)
        torch.cuda.set_device(local)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, init_method, timeout, ranks, rank)
    except (RuntimeError, ValueError) as error:
        raise CalibrationError(
            f"The ranks of the job did not come together within {timeout_s:.0f} s.",
            f"torch says: {_first_line(error)}",
            "Start the same line on every host, and see that MASTER_ADDR and the network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) are right.",
        ) from error
    try:
        yield
    except PassesError:
        raise
    except RuntimeError as error:
        raise CalibrationError(
            f"Rank {dist.get_rank()} could not go on measuring: {_first_line(error)}",
            "Most often another rank has failed or is gone.",
            "Look for the error of the rank that failed first.",
        ) from error
    finally:
        dist.destroy_process_group()


def local_rank(rank: int = -1) -> int:
    """This process's number on its host, which is that of its GPU; ``rank`` where no launcher
    has said it.
    """
    return int(os.environ.get("LOCAL_RANK", max(rank, 0)))


def machine(device_type: str) -> str:
    """The device at hand, in words."""
    if device_type == "cuda":
        precision = torch.get_float32_matmul_precision()
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        return f"{name}, float32 products at precision {precision!r}"
    threads = torch.get_num_threads()
    return (
        f"{_cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} a "
        f"rank, load average {os.getloadavg()[0]:.1f}"
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _too_few_gpus(why: str, there: int) -> CalibrationError:
    return CalibrationError(
        f"This host shows {there} GPU{'s' if there != 1 else ''}, but {why}.",
        "Each rank needs one of its own.",
        "Start as many ranks as there are GPUs (torchrun --nproc-per-node).",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
