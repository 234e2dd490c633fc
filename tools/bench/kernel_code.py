"""What do the kernels compile to? Writes the table of machine-code facts, and fails if the gate
does.

usage: kernel_code.py [--write results/kernel_code.json]

Compiled ahead of time for sm_80, sm_90 and sm_100, in bfloat16 on eight ranks; no GPU takes part,
and no time is measured. Registers and spills are those of ptxas, shared memory that of the launch.
"""

import argparse
import dataclasses
import json
import sys

import triton
from machine_code.ahead import compile_build, gate
from machine_code.builds import CAPABILITIES, builds
from rich.console import Console
from rich.table import Table


def main() -> int:
    """Compile, print, write; 1 if the gate finds a problem."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="PATH", help="write the table as JSON")
    arguments = parser.parse_args()
    rows, problems = [], []
    for capability in CAPABILITIES:
        for build in builds(capability):
            facts, _ = compile_build(build, capability)
            rows.append(facts)
            problems += gate(build, facts)
    fields = [field.name for field in dataclasses.fields(rows[0])]
    table = Table(*fields, title=f"triton {triton.__version__}")
    for facts in rows:
        table.add_row(*(str(getattr(facts, field)) for field in fields))
    Console(width=200).print(table)
    if arguments.write:
        content = {
            "kind": "compiled ahead of time, not run",
            "triton": triton.__version__,
            "kernels": [dataclasses.asdict(facts) for facts in rows],
        }
        with open(arguments.write, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
    for problem in problems:
        print(problem, file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
