"""``python -m inductor_passes costs``: measure this machine or job, or import measurements, into a
topology file.

Each file is the output of an NCCL-tests benchmark or a profile of torch.profiler (JSON, plain or
gzipped). What is measured counts instead of the formulas; how far the formulas were off is printed.

Alone it measures with one rank for each visible GPU, or two on a CPU. One GPU has no links: theirs
come from ``--base``, and so does everything else that is not measured; each figure's source says
so.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from inductor_passes import files
from inductor_passes.cost import importing, measured_topology
from inductor_passes.cost.importing import Measurements, add_to, errors_as_text, errors_of
from inductor_passes.cost.measure_device import (
    Clock,
    CpuClock,
    CudaClock,
    measure_device,
    part_count,
)
from inductor_passes.cost.measure_links import Layout, layout_of_job, measure_links, table_count
from inductor_passes.cost.measured_topology import tables_of, topology_of
from inductor_passes.cost.topology import (
    Topology,
    built,
    default_topology,
    dump_topology,
    load_topology,
    topology_text,
)
from inductor_passes.errors import CalibrationError, PassesError, TopologyError


@dataclasses.dataclass(frozen=True, slots=True)
class MeasureOptions:
    """The command line. ``base`` is a topology's name or path; rates are GB/s, times seconds."""

    out: str | None
    name: str | None
    base: str | None
    device: str | None
    ranks: int | None
    seconds: float
    timeout: float
    inter_node_gb_per_s: float | None
    json: bool


def _add_measure_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("-o", "--out", help="topology file to write; printed if left out")
    parser.add_argument("--name", help="the topology's name; default: that of the file written")
    parser.add_argument(
        "--base",
        help=(
            "topology, by name or JSON file, for what is not measured; default: h100x8 on GPUs, "
            "cpu-gloo on a CPU"
        ),
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: cuda where there is one"
    )
    parser.add_argument(
        "--ranks",
        type=int,
        help="ranks to start here; default: one a GPU, or 2. Not under torchrun",
    )
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="time to measure for, about; default 60"
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds a rank waits for others; default 120"
    )
    parser.add_argument(
        "--inter-node-gb-per-s",
        type=float,
        help="rate of the link between hosts, if there is one host",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _run_measure(arguments: argparse.Namespace) -> int:
    """Measure, write, print; after a one-line error 2 for a bad topology, 1 for all else.

    Under a launcher every rank does so, the first writes.
    """
    names = [field.name for field in dataclasses.fields(MeasureOptions)]
    options = MeasureOptions(**{name: getattr(arguments, name) for name in names})
    try:
        options = _checked(options)
        device = str(options.device)
        if measured_topology.is_launched():
            with measured_topology.inside_job(device, options.timeout):
                _measure(options)
            return 0
        ranks = measured_topology.rank_count(device, options.ranks)
        if ranks > 1:
            return measured_topology.run_ranks(
                ranks, functools.partial(_measure, options), options.timeout, device
            )
        _measure(options)
    except (PassesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, TopologyError) else 1
    return 0


def _checked(options: MeasureOptions) -> MeasureOptions:
    """With every default filled in; what is wrong is said now, and not after minutes."""
    writes = options.out is not None and os.environ.get("RANK", "0") == "0"
    if writes and not Path(str(options.out)).resolve().parent.is_dir():
        raise CalibrationError(
            f"Cannot write {options.out!r}: its folder does not exist.", fix="Make it first."
        )
    if min(options.seconds, options.timeout, options.ranks or 1) <= 0:
        raise CalibrationError("--seconds, --timeout and --ranks are above zero.")
    device = measured_topology.chosen_device(options.device)
    base = options.base or default_topology(device)
    load_topology(base)
    name = options.name or (Path(options.out).stem if options.out else "measured")
    return dataclasses.replace(options, device=device, base=base, name=name)


def _measure(options: MeasureOptions) -> None:
    """Do one rank's part of the measurement, inside the job if there is more than one."""
    device, links = str(options.device), None
    clock: Clock = (
        CpuClock() if device == "cpu" else CudaClock(measured_topology.local_rank(_rank()))
    )
    layout = layout_of_job() if dist.is_initialized() else Layout(1, 1)
    # All links have tables, all devices parts: rank 0 counts them for everyone.
    with _progress(layout) as bar:
        task = bar.add_task("", total=part_count() + table_count(layout))

        def note(text: str) -> None:
            bar.update(task, advance=1, description=text)

        share = options.seconds / (2 if layout.ranks > 1 else 1)
        times = measure_device(clock, seconds=share, note=note)
        if layout.ranks > 1:
            links = measure_links(clock, layout, seconds=share, note=note)
    if _rank() > 0:
        return
    where = (
        f"{measured_topology.machine(device)}, {_ranks_text(layout, device)}, torch "
        f"{torch.__version__}, "
        f"{datetime.date.today()}"
    )
    content = topology_of(
        str(options.base), name=str(options.name), where=where, device=times, links=links
    )
    if options.inter_node_gb_per_s is not None and layout.nodes == 1:
        content["links"]["inter_node_gb_per_s"] = {
            "value": options.inter_node_gb_per_s,
            "source": "given on the command line of costs measure, not measured",
        }
    found = tables_of(where, times, links)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "topology.json"
        path.write_text(dump_topology(content), encoding="utf-8")
        rows = errors_of(found, load_topology(path))
        add_to(content, found)
        path.write_text(dump_topology(content), encoding="utf-8")
        load_topology(path)
    _show(options, content, rows)


def _show(options: MeasureOptions, content: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    text = dump_topology(content) + "\n"
    if options.out is None:
        print(text, end="")
        return
    Path(options.out).write_text(text, encoding="utf-8")
    result = {"topology": content["name"], "out": options.out, "tables": rows}
    print(json.dumps(result) if options.json else errors_as_text(result))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _ranks_text(layout: Layout, device: str) -> str:
    if layout.ranks == 1:
        return "one rank"
    backend = "gloo" if device == "cpu" else "NCCL"
    hosts = "one host" if layout.nodes == 1 else f"{layout.nodes} hosts"
    return f"{layout.ranks} {backend} ranks on {hosts}"


def _progress(layout: Layout) -> Progress:
    """On the terminal of the first rank, if there is one."""
    console = Console(stderr=True)
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description:<44}"),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=_rank() > 0 or not console.is_terminal,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    actions = parser.add_subparsers(dest="action", required=True)
    summary = "measure this machine, or under torchrun this job, and write a topology file"
    _add_measure_arguments(actions.add_parser("measure", help=summary, description=summary))
    command = actions.add_parser("import", help="add NCCL-tests output and profiles to a topology")
    command.add_argument("files", nargs="+", metavar="FILE")
    command.add_argument("--topology", required=True, help="what to add to: a name or a JSON file")
    command.add_argument("-o", "--out", required=True, help="topology file to write")
    command.add_argument(
        "--name", help="the new topology's name; default: that of the file written"
    )
    command.add_argument(
        "--kind",
        choices=importing.BENCHMARKS,
        help="benchmark, where an output does not say it",
    )
    command.add_argument("--ranks", type=int, help="where an output does not list its ranks")
    command.add_argument("--nodes", type=int, help="nodes that these ranks are on")
    command.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read, write, print; 0, or 2 after a one-line error."""
    if arguments.action == "measure":
        return _run_measure(arguments)
    try:
        base = load_topology(arguments.topology)
        tables = [_read(Path(file), arguments, base) for file in arguments.files]
        content = json.loads(topology_text(arguments.topology))
        content["name"] = arguments.name or Path(arguments.out).stem
        for found in tables:
            add_to(content, found)
        text = dump_topology(content) + "\n"
        built(text, arguments.out)  # what would not load is not written
        Path(arguments.out).write_text(text, encoding="utf-8")
    except (PassesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = {
        "topology": content["name"],
        "out": arguments.out,
        "tables": [row for found in tables for row in errors_of(found, base)],
    }
    print(json.dumps(result) if arguments.json else errors_as_text(result))
    return 0


def _read(path: Path, arguments: argparse.Namespace, base: Topology) -> Measurements:
    text = files.text_of(path, importing.PROFILE)
    if not text.lstrip().startswith(("{", "[")):
        return importing.parse_nccl_tests(
            text, path.name, kind=arguments.kind, ranks=arguments.ranks, nodes=arguments.nodes
        )
    trace = files.parsed(text, str(path), importing.PROFILE)
    found = importing.parse_profile(trace, path.name, ranks_per_node=base.ranks_per_node)
    if not found:
        raise TopologyError(
            f"{str(path)!r} has no collective and no matrix product that can be read.",
            "NCCL kernels need their metadata, products their shapes.",
            "Profile with record_shapes=True.",
        )
    return found
