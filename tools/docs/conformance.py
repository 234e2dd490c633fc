"""Write docs/reference/ddp-and-fsdp2.md: what DDP and FSDP2 do in compiled functions, from the
programs that show it.

python tools/docs/conformance.py           # write it
python tools/docs/conformance.py --check   # exit with 1 if it is not what the programs say
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "ddp-and-fsdp2.md"
PROGRAMS = ROOT / "test" / "e2e" / "conformance"
TITLES = {
    "ddp": "DistributedDataParallel",
    "replicate": "replicate",
    "fsdp2": "FSDP2",
    "hsdp": "FSDP2 on a mesh of copies (HSDP)",
}
HEAD = """# DDP and FSDP2 in compiled functions

`python tools/docs/conformance.py` writes this page from the programs in `test/e2e/conformance`.
`pytest -m "slow or sweep" test/e2e/conformance` runs all of them.

Each line is one program on two real gloo ranks. It trains six steps with SGD and with AdamW, on
batches of equal and of different lengths. It runs three times: in eager mode, compiled whole, and
with its blocks compiled. The test compares three things:

- All gradients after each backward, `None` or not.
- Parameters and buffers at the end.
- Collectives and bytes of the last step. They never exceed eager mode's, unless a line says so.

"In the graph" means: forward and backward are one graph each, and gathers, reductions and averages
are operations of them. "Eager" means: a graph break with the quoted reason leaves the wrapper in
eager mode, around compiled blocks.
"""


def programs() -> Iterator[tuple[str, str, str, dict[str, object]]]:
    """Wrapper, name, text and options of every program, in order."""
    for file in ("ddp.py", "fsdp2.py"):
        for node in ast.parse((PROGRAMS / file).read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for each in node.decorator_list:
                if isinstance(each, ast.Call) and getattr(each.func, "id", "") == "program":
                    options = {str(k.arg): ast.literal_eval(k.value) for k in each.keywords}
                    text = " ".join((ast.get_docstring(node) or "").split())
                    yield ast.literal_eval(each.args[0]), node.name, text, options


def render() -> str:
    """Return the page."""
    lines = [HEAD]
    found = list(programs())
    for wrapper, title in TITLES.items():
        rows = [each for each in found if each[0] == wrapper]
        lines += [f"## {title}", "", "| behaviour | state | program |", "| --- | --- | --- |"]
        for _, name, text, options in rows:
            eager = options.get("eager")
            state = f'eager: "{eager}"' if eager else "in the graph"
            if not eager and options.get("fewer") is False:
                state += "; may launch more than eager mode"
            lines.append(f"| {text} | {state} | `{name}` |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = render()
    if not parser.parse_args().check:
        PAGE.write_text(text)
        return 0
    return int(PAGE.read_text() != text)


if __name__ == "__main__":
    sys.exit(main())
