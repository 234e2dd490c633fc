"""A failing program as a file of its own: what it computes, on what, and how to see it fail."""

from __future__ import annotations

import pprint
from pathlib import Path

from fuzzing.execute import Verdict
from fuzzing.program import Program

_TEMPLATE = '''"""Found by tools/fuzz.py, program {seed}: {status}.

{why}

Run it: PYTHONPATH=.:test/support python {name}
"""

import torch

# What the ranks run, {ranks} of them on a mesh of {mesh}; programs of functional collectives go through the
# passes as they are traced, others through torch.compile.
{source}

if __name__ == "__main__":
    from fuzzing.execute import prepare
    from fuzzing.kinds import run
    from fuzzing.program import Input, Layer, Program, Statement

    PROGRAM = {program}
    prepare()
    verdict = run(PROGRAM)
    print(verdict.status, verdict.why)
    raise SystemExit(verdict.found)
'''


def write(program: Program, verdict: Verdict, folder: Path) -> Path:
    """Write ``<kind>_<seed>.py`` into the folder; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{program.kind}_{program.seed}.py"
    why = verdict.why.strip().splitlines()
    text = _TEMPLATE.format(
        seed=program.seed,
        status=verdict.status,
        why=(why[0] if why else "").replace('"""', "'''").replace("\\", "/"),
        name=path.name,
        ranks=program.ranks,
        mesh=program.mesh,
        source=program.source(),
        program=pprint.pformat(program, width=100).replace("\n", "\n    "),
    )
    path.write_text(text)
    return path
