"""Results as the page ``docs/dtensor-in-graphs.md``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from comparison.in_graphs.outcome import BAD, CLASSES, KNOWN_ERRORS
from comparison.in_graphs.rank import ROW_S
from comparison.in_graphs.row import known, titles

from dynamo_dist.reporting.breaks.catalog import advise
from dynamo_dist.reporting.breaks.messages import parse

HEAD = """\
# DTensor programs in graphs

{number} short programs, each run on {ranks} gloo ranks on CPUs in three ways: in eager mode, by `torch.compile` with the plugin off, and
by `torch.compile(backend="dynamo_dist")`. Made by `python tools/in_graphs.py` with torch {torch}; the programs are in `test/support/comparison/in_graphs/`.

- *works*: no graph break, and eager mode's numbers on every rank: results, gradients, and what was written to. Ranks that hold other lengths are meant
  where a row says so.
- *breaks*: the same numbers, with graph breaks.
- *refuses*: an error that names what is not done, or any error on every rank where eager mode raises too.
- *error*: another error. *wrong*: other numbers than in eager mode. *hangs*: no end within {seconds} s.

Compiled code is Inductor's, whose kernels on the CPU are torch's own operators (`fallback_by_default`). Attention by `flex_attention` is traced
and not lowered. Where eager mode itself raises without the plugin, or takes a rank's part for the whole, its numbers with the plugin on are taken for the truth, and *(eager)* stands behind the row.

{counts}

{both} of them work with both, {gained} with the plugin alone, {lost} with stock alone.
"""


def counted(rows: Mapping[str, Any]) -> str:
    """A table of how many rows ended how."""
    lines = ["| | " + " | ".join(CLASSES) + " |", "| --- |" + " --- |" * len(CLASSES)]
    for side, says in (("stock", "stock"), ("ours", "dynamo_dist")):
        counts = Counter(each[side]["class"] for each in rows.values())
        lines.append(f"| {says} | " + " | ".join(str(counts[each]) for each in CLASSES) + " |")
    return "\n".join(lines)


def faults(rows: Mapping[str, Any]) -> list[str]:
    """Rows that must not be so: ours wrong, hanging or failing, or worse than stock."""
    found = []
    for name, each in rows.items():
        ours, stock = each["ours"]["class"], each.get("stock", {}).get("class", "not run")
        is_known = ours == "error" and name in KNOWN_ERRORS
        if (ours in BAD and not is_known) or (stock == "works" and ours != "works"):
            found.append(f"{name}: ours {ours}, stock {stock}: {each['ours']['why'][:200]}")
    return found


def page(kept: Mapping[str, Any]) -> str:
    """The whole page."""
    rows: Mapping[str, Any] = kept["rows"]
    works = {
        side: {name for name, each in rows.items() if each[side]["class"] == "works"}
        for side in ("stock", "ours")
    }
    text = HEAD.format(
        number=len(rows),
        ranks="two or four",
        torch=kept["torch"],
        seconds=ROW_S,
        counts=counted(rows),
        both=len(works["stock"] & works["ours"]),
        gained=len(works["ours"] - works["stock"]),
        lost=len(works["stock"] - works["ours"]),
    )
    programs = known()
    for section, title in titles().items():
        lines = [f"\n## {title}\n", "| program | stock | dynamo_dist |", "| --- | --- | --- |"]
        for name, each in rows.items():
            if programs[name].section != section:
                continue
            says = programs[name].says + (" *(eager)*" if each["truth"] == "plugin" else "")
            lines.append(
                f"| {_cell(says)} `{name}` | {each['stock']['class']} | {_ours(each['ours'])} |"
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
