"""Pages of docs/reference that are written from results: ``dtensor-in-graphs.md``, and the tables of
``strategies.md``.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from comparison.outcome import End
from comparison.parts import PARTS
from comparison.row import known, titles

from dynamo_dist.diagnostics.breaks import advise, parse

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tools" / "bench" / "results" / "dtensor_in_graphs.json"
GRAPHS = ROOT / "docs" / "reference" / "dtensor-in-graphs.md"
STRATEGIES = ROOT / "docs" / "reference" / "strategies.md"
CLASSES = ("works", "breaks", "refuses", "error", "wrong", "hangs")
CLASS_OF = {"right": "works", "hang": "hangs", "crash": "error"}
FIRST_ROW = "| rules | operators |"
Ends = Mapping[str, Mapping[str, End]]  # by side, then by program


def write(part: str, ends: Ends) -> None:
    """Write the page of a part, if it has one. Rows that did not run keep what the file of
    results says.
    """
    if part == "graphs":
        kept = json.loads(RESULTS.read_text())["rows"] if RESULTS.exists() else {}
        kept |= rows_of(ends)
        rows = {name: kept[name] for name in known() if name in kept}
        record = {"torch": torch.__version__.partition("+")[0], "rows": rows}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
        GRAPHS.write_text(page(record))
    if part == "strategies":
        text = STRATEGIES.read_text()
        STRATEGIES.write_text(text.partition(FIRST_ROW)[0] + strategies(ends))


def rows_of(ends: Ends) -> dict[str, Any]:
    """By row: whose eager mode is its truth, and the class of each side."""
    return {
        name: {
            "truth": ours.truth or "none",
            **{
                side: {"class": CLASS_OF.get(end.status, end.status), "why": end.why}
                for side, end in (("upstream", ends["upstream"][name]), ("ours", ours))
            },
        }
        for name, ours in ends["ours"].items()
    }


def strategies(ends: Ends) -> str:
    """Figures of the sweep, then one row for each operator that is not ok on some side."""
    lines = [FIRST_ROW, "| --- | --- |"]
    for side, found in ends.items():
        counts = Counter(_verdict(end).partition(" (")[0] for end in found.values())
        said = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
        lines.append(f"| {side} | {len(found)} operators: {said} |")
    lines += ["", "| operator | " + " | ".join(ends) + " |", "| --- |" + " --- |" * len(ends)]
    for name in next(iter(ends.values())):
        cells = [_verdict(found[name]) for found in ends.values()]
        if any(cell not in ("ok", "no tensor input") for cell in cells):
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _verdict(end: End) -> str:
    """``ok``, or what is wrong and in how many cases of all."""
    if end.status in ("right", "unfit"):
        return "ok" if end.status == "right" else "no tensor input"
    return end.status if end.status in ("hang", "crash") else end.why.partition(": ")[0]


HEAD = """\
# DTensor programs in graphs

`python tools/parity.py --part graphs --pages` wrote this page with torch {torch}. The {number}
short programs are in `test/support/comparison/in_graphs/`. Each ran on {ranks} gloo ranks on
CPUs, three times: in eager mode, by `torch.compile` with the plugin off, and by
`torch.compile(backend="dynamo_dist")`.

| word | means |
| --- | --- |
| works | No graph break, and eager mode's numbers on every rank: results, gradients, mutated inputs. |
| breaks | The same numbers, with graph breaks. |
| refuses | An error that names what is not done, or an error on every rank where eager mode raises too. |
| error | Another error. |
| wrong | Other numbers than in eager mode. |
| hangs | No end within {seconds} s. |

On the CPU, Inductor calls torch's own kernels here (`fallback_by_default`). `flex_attention` is
traced and not lowered. Some programs raise in eager mode without the plugin, or take one rank's
shard for the whole tensor. The reference is then eager mode with the plugin on, and the row says
*(eager)*.

{counts}

{both} of them work with both, {gained} with the plugin alone, {lost} with upstream alone.
"""


def counted(rows: Mapping[str, Any]) -> str:
    """A table of how many rows ended how."""
    lines = ["| | " + " | ".join(CLASSES) + " |", "| --- |" + " --- |" * len(CLASSES)]
    for side, says in (("upstream", "upstream"), ("ours", "dynamo_dist")):
        counts = Counter(each[side]["class"] for each in rows.values())
        lines.append(f"| {says} | " + " | ".join(str(counts[each]) for each in CLASSES) + " |")
    return "\n".join(lines)


def page(kept: Mapping[str, Any]) -> str:
    """The whole page."""
    rows: Mapping[str, Any] = kept["rows"]
    works = {
        side: {name for name, each in rows.items() if each[side]["class"] == "works"}
        for side in ("upstream", "ours")
    }
    text = HEAD.format(
        number=len(rows),
        ranks="two or four",
        torch=kept["torch"],
        seconds=round(PARTS["graphs"].seconds),
        counts=counted(rows),
        both=len(works["upstream"] & works["ours"]),
        gained=len(works["ours"] - works["upstream"]),
        lost=len(works["upstream"] - works["ours"]),
    )
    programs = known()
    for section, title in titles().items():
        lines = [f"\n## {title}\n", "| program | upstream | dynamo_dist |", "| --- | --- | --- |"]
        for name, each in rows.items():
            if programs[name].section != section:
                continue
            says = programs[name].says + (" *(eager)*" if each["truth"] == "plugin" else "")
            lines.append(
                f"| {_cell(says)} `{name}` | {each['upstream']['class']} | {_ours(each['ours'])} |"
            )
        text += "\n".join(lines) + "\n"
    return text


def _ours(end: Mapping[str, str]) -> str:
    """The class, and where it is not "works" the reason and the way out."""
    if end["class"] == "works":
        return "works"
    if end["class"] == "breaks":
        message = parse(end["why"])[0]
        advice = advise(message)
        named = f" ([{advice.cause}](graph-breaks.md#{advice.cause}))" if advice.cause else ""
        return _cell(f"breaks: {_short(advice.why or message.kind)}{named}")
    return _cell(f"{end['class']}: {_short(end['why'])}")


def _short(text: str, limit: int = 240) -> str:
    text = re.sub(r"^(?:[\w.]+: )+", "", " ".join(text.split()))
    return text if len(text) <= limit else text[:limit].rsplit(" ", 1)[0] + " ..."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
