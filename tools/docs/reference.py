"""Write the pages of docs/reference that come from the code: one page for each template here.

    python tools/docs/reference.py           # write them
    python tools/docs/reference.py --check   # exit with 1 if a page differs from the code

The text about a thing stands once, in its docstring. A test keeps the pages and the code together.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import jinja2

import dynamo_dist.__main__ as of_dynamo_dist
import dynamo_dist.errors
import inductor_passes.__main__ as of_inductor_passes
import inductor_passes.errors
from dynamo_dist import graph_compile, settings
from dynamo_dist.autoload import ARTIFACTS, LOG_NAMES
from dynamo_dist.diagnostics import live
from dynamo_dist.diagnostics.breaks import CATALOG
from dynamo_dist.diagnostics.records import json_schema
from inductor_passes import order_pinning, plugins, registry
from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.cost import topology as topology_file
from inductor_passes.fused.kernels import availability
from inductor_passes.graph_pass import PassContext, ScheduleOptions
from inductor_passes.pass_options import PassOptions, extra_options
from inductor_passes.report import logs as passes_logs
from inductor_passes.schedule.solver import problem_file

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCS = ROOT / "docs" / "reference"
# Words of a cause that come from a program; with braces where a space may follow or not.
FILLED = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
# Where one entry of several on a line ends.
NEXT_ENTRY = re.compile(r"(?<=\.) (?=`\w+`: )")
ENTRY = re.compile(r"^(\w+(?:, \w+)*|``\w+``): (.*(?:\n {4}.*)*)", re.MULTILINE)
VARIABLES = {
    settings.INDUCTOR: (
        'Set to 1: `backend="inductor"` compiles as `backend="dynamo_dist"` does, from the first '
        "`torch.compile` on. Set it on all ranks."
    ),
    settings.TRACKERS_OFF: (
        "Trackers to leave to upstream, to find the one at fault: "
        f"{', '.join(settings.TRACKER_NAMES)}."
    ),
    settings.AGREEMENT_SECONDS: (
        "Seconds for which a rank waits for others to compile the same graph (30). With 0 there is "
        "no agreement: graphs keep the program's order, nothing is merged, and no compile shared "
        "unless asked for. Of a compile that ranks share, also how long it may stay in one "
        "function before the others compile for themselves."
    ),
    availability.SECONDS_VARIABLE: (
        "Seconds for which a fused kernel waits for a peer before it ends with an error (450, at "
        "most 466). Set it on all ranks."
    ),
    passes_logs.FOLDER: (
        "A folder for each graph before its passes and after each pass that changed it, with the "
        "diffs."
    ),
    plugins.OFF: ("Names of plugins to leave out, separated by commas. Set it on all ranks."),
}


def prose(text: str) -> str:
    """A docstring's paragraph as Markdown on one line."""
    return " ".join(text.split()).replace("``", "`")


def wrapped(text: str, indent: str = "") -> str:
    """Text in lines of at most 100 columns, as every page of docs/ has them."""
    return textwrap.fill(
        text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def summary(documented: object) -> str:
    """The first paragraph of a docstring."""
    return prose((inspect.getdoc(documented) or "").split("\n\n")[0])


def described(options: type) -> Iterator[tuple[str, str, str]]:
    """Name, meaning and default of each field, from the lines ``name: meaning`` of the
    docstring.
    """
    entries = {}
    for names, meaning in ENTRY.findall(inspect.getdoc(options) or ""):
        entries.update(dict.fromkeys(names.split(", "), prose(meaning)))
    for field in dataclasses.fields(options):
        if field.name not in entries:  # extra, whose keys stand as options of their own
            continue
        default = field.default
        if default is dataclasses.MISSING:
            default = "{}"
        yield field.name, entries[field.name], f"{default!r}" if default != "{}" else default


def options() -> Iterator[tuple[str, str, str]]:
    """The core's options and those of extensions."""
    graph_compile.register_options()
    yield from described(PassOptions)
    for name, option in extra_options().items():
        yield name, prose(option.meaning), f"{option.default!r}"


def passes() -> Iterator[dict[str, str]]:
    """Every pass of ours, in the order in which they run."""
    for pass_ in filter(registry.is_built_in, registry.ordered_passes()):
        of_all = "" if pass_.needs_collectives else "on graphs without a collective too"
        yield {
            "name": pass_.name,
            "numerics": numerics(pass_),
            "summary": summary(pass_),
            "note": of_all,
        }


def numerics(pass_: registry.Registered) -> str:
    """How a pass may change numbers: the word that reports show, by default and under ``exact``."""
    cost = TopologyCostModel(load_topology("cpu-gloo"))
    usual, exact = (
        (pass_.build(PassContext(cost, exact=exact)) if isinstance(pass_, type) else pass_)
        for exact in (False, True)
    )
    word, with_exact = usual.numerics.value, exact.numerics.value
    return word if word == with_exact else f"{word}; {with_exact} under `exact`"


def commands() -> Iterator[tuple[str, str]]:
    """Every command's name and its ``--help``, in a terminal of 100 columns."""
    for module in (of_dynamo_dist, of_inductor_passes):
        yield from _below(module.parser())


def _below(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                sub.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
                yield sub.prog, "\n".join(map(_narrow, sub.format_help().rstrip().split("\n")))
                yield from _below(sub)


def _narrow(line: str) -> str:
    """A line of help in at most 100 columns: argparse never breaks a list of choices."""
    choices = line.find("{") + 1
    lines = [line]
    while len(lines[-1]) > 100 and choices:
        at = lines[-1].rfind(",", 0, 100) + 1
        lines[-1:] = [lines[-1][:at], " " * choices + lines[-1][at:]]
    return "\n".join(lines)


def errors(module: ModuleType) -> list[tuple[str, str]]:
    """The exceptions of a module and what each is for."""
    found = [
        c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__
    ]
    return [(c.__name__, summary(c)) for c in found]


def topology() -> str:
    """The shape of a topology file, as its reader states it."""
    text = inspect.getdoc(topology_file) or ""
    return textwrap.dedent(text.split("::\n\n")[1].split("\n\nwhere")[0])


def breaks() -> dict[str, list[tuple[str, str]]]:
    """Name of each break that the catalog knows -> its causes and fixes.

    Words that come from a program stand in italics, and in code in capitals. Causes of one name
    share a fix where the fix is the same text.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for cause in CATALOG:
        why = wrapped(
            FILLED.sub(lambda word: f"*{word[1] or word[2]}*" + " " * bool(word[2]), cause.why)
        )
        fix = FILLED.sub(lambda word: (word[1] or word[2]).upper(), cause.fix)
        causes = found.setdefault(cause.name, [])
        if causes and causes[-1][1] == fix:
            causes[-1] = (f"{causes[-1][0]}\n\n{why}", fix)
        else:
            causes.append((why, fix))
    return found


def public_names() -> Iterator[tuple[str, list[dict[str, object]]]]:
    """Module -> its public functions and classes, errors left out: those that users may name."""
    names = json.loads((ROOT / "test" / "public_names.json").read_text())["names"]
    by_module: dict[str, list[dict[str, object]]] = {}
    for name in sorted(names):
        module, _, last = name.rpartition(".")
        if module.endswith("errors") or not module:
            continue
        documented = getattr(importlib.import_module(module), last)
        if inspect.isfunction(documented) or inspect.isclass(documented):
            by_module.setdefault(module, []).append(
                {
                    "name": name,
                    "signature": signature(name, documented),
                    "text": markdown(inspect.getdoc(documented) or ""),
                    "methods": methods(documented) if inspect.isclass(documented) else [],
                }
            )
    yield from sorted(by_module.items())


def signature(name: str, documented: Callable[..., object]) -> str:
    """How a function is called or a class is made, in lines of at most 100 columns."""
    if isinstance(documented, type) and issubclass(documented, enum.Enum):
        return "\n".join(f"{name}.{each.name}  # {each.value!r}" for each in documented)
    bare = parameters(documented)
    line = f"{name}({', '.join(bare)})"
    if len(line) <= 100:
        return line
    return "\n    ".join([f"{name}(", *(f"{each}," for each in bare)]) + "\n)"


def parameters(function: Callable[..., object]) -> list[str]:
    """The parameters of a function as text, without types and without self or cls."""
    found = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.name not in ("self", "cls")
    ]
    bare = [
        str(each.replace(annotation=inspect.Parameter.empty)).replace("<factory>", "...")
        for each in found
    ]
    # What is given only by position ends with a slash; what is given only by name follows a star.
    kinds = [each.kind for each in found]
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        bare.insert(kinds.index(inspect.Parameter.POSITIONAL_ONLY) + 1, "/")
    elif inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        bare.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    return bare


def methods(class_: type) -> list[str]:
    """The public methods that a class defines, one list entry each."""
    return [
        wrapped(f"- `{name}({', '.join(parameters(getattr(class_, name)))})`: {text}", "  ")
        for name in vars(class_)
        if not name.startswith("_")
        and callable(getattr(class_, name))
        and not isinstance(getattr(class_, name), type)
        and (text := summary(getattr(class_, name)))
    ]


def markdown(docstring: str) -> str:
    """A docstring as Markdown: its paragraphs, and entries ``name: meaning`` as a list."""
    blocks = []
    for paragraph in docstring.split("\n\n"):
        lines = [f"`{names.strip('`')}`: {meaning}" for names, meaning in ENTRY.findall(paragraph)]
        if not lines or ENTRY.sub("", paragraph).strip():
            lines = [prose(paragraph)]
        entries = [each for line in lines for each in NEXT_ENTRY.split(prose(line))]
        if all(each.startswith("`") and "`: " in each for each in entries):
            blocks.append("\n".join(wrapped(f"- {each}", "  ") for each in entries))
        else:
            blocks.append(wrapped(prose(paragraph)))
    return "\n\n".join(blocks)


def report_fields() -> Iterator[tuple[str, str, list[str]]]:
    """Each record of the report's schema: its name, what it is, and the fields it has."""
    definitions = json_schema()["$defs"]
    assert isinstance(definitions, dict)
    for name, definition in definitions.items():
        text = prose(definition.get("description", "")).partition(". ")[0].rstrip(".")
        yield name, text, list(definition["properties"])


def problem_form() -> str:
    """The text on the form of schedule problems, from the module that reads them."""
    return wrapped(prose((inspect.getdoc(problem_file) or "").split("\n\n")[1]))


def render() -> dict[str, str]:
    """File name -> text of every page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
    )
    values = {
        "options": list(options()),
        "schedule": list(described(ScheduleOptions)),
        "passes": list(passes()),
        "pin": order_pinning.NAME,
        "commands": list(commands()),
        "variables": VARIABLES,
        "logs": LOG_NAMES,
        "artifacts": ARTIFACTS,
        "log_modules": {**passes_logs.modules(), **live.MODULES},
        "plugin_group": registry.PLUGIN_GROUP,
        "errors": {
            "dynamo_dist.errors": errors(dynamo_dist.errors),
            "inductor_passes.errors": errors(inductor_passes.errors),
        },
        "topology": topology(),
        "problem": problem_form(),
        "report_fields": list(report_fields()),
        "modules": list(public_names()),
        "breaks": breaks(),
    }
    return {
        path.stem: environment.get_template(path.name).render(values).rstrip() + "\n"
        for path in sorted(HERE.glob("*.md.j2"))
    }


def main() -> int:
    """Write or check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = 0
    for name, text in render().items():
        page = DOCS / name
        if not check:
            page.write_text(text)
        elif page.read_text() != text:
            print(f"{name} is not what the code says: run python tools/docs/reference.py")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
