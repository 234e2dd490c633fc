"""``python -m inductor_passes costs``: measuring, and ``import FILE...`` into a topology file.

Each file is the output of an NCCL-tests benchmark or a profile of torch.profiler (JSON, plain or
gzipped). What is measured counts instead of the formulas; how far the formulas were off is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from inductor_passes import files
from inductor_passes.cli import measure as measure_command
from inductor_passes.errors import PassesError, TopologyError
from inductor_passes.machine.importing import kineto, nccl_tests
from inductor_passes.machine.importing.errors import errors_as_text, errors_of
from inductor_passes.machine.importing.measurements import Measurements, add_to
from inductor_passes.machine.topology.file import dump_topology
from inductor_passes.machine.topology.topology import Topology, built, load_topology, topology_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    actions = parser.add_subparsers(dest="action", required=True)
    summary = "measure this machine, or under torchrun this job, and write a topology file"
    measure_command.add_arguments(actions.add_parser("measure", help=summary, description=summary))
    importing = actions.add_parser(
        "import", help="add NCCL-tests output and profiles to a topology"
    )
    importing.add_argument("files", nargs="+", metavar="FILE")
    importing.add_argument(
        "--topology", required=True, help="what to add to: a name or a JSON file"
    )
    importing.add_argument("-o", "--out", required=True, help="topology file to write")
    importing.add_argument(
        "--name", help="the new topology's name; default: that of the file written"
    )
    importing.add_argument(
        "--kind", choices=nccl_tests.BENCHMARKS, help="benchmark, where an output does not say it"
    )
    importing.add_argument("--ranks", type=int, help="where an output does not list its ranks")
    importing.add_argument("--nodes", type=int, help="nodes that these ranks are on")
    importing.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read, write, print; 0, or 2 after a one-line error."""
    if arguments.action == "measure":
        return measure_command.run(arguments)
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
    text = files.text_of(path, kineto.PROFILE)
    if not text.lstrip().startswith(("{", "[")):
        return nccl_tests.parse(
            text, path.name, kind=arguments.kind, ranks=arguments.ranks, nodes=arguments.nodes
        )
    trace = files.parsed(text, str(path), kineto.PROFILE)
    found = kineto.parse(trace, path.name, ranks_per_node=base.ranks_per_node)
    if not found:
        raise TopologyError(
            f"{str(path)!r} has no collective and no matrix product that can be read.",
            "NCCL kernels need their metadata, products their shapes.",
            "Profile with record_shapes=True.",
        )
    return found
