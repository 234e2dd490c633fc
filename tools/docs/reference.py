"""Write the pages of docs/ that the code tells: reference.md and graph-breaks.md.

    python tools/docs/reference.py           # write them
    python tools/docs/reference.py --check   # exit with 1 if one is not what the code says

What is said of a thing stands once, in its docstring; a test keeps the pages and the code together.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import jinja2

import dynamo_dist.__main__ as of_dynamo_dist
import dynamo_dist.errors
import inductor_passes.__main__ as of_inductor_passes
import inductor_passes.errors
from dynamo_dist import graph_compile, settings
from dynamo_dist.autoload import ARTIFACTS, LOG_NAMES
from dynamo_dist.diagnostics.breaks import CATALOG
from inductor_passes import order_pinning, plugins, registry
from inductor_passes.cost import topology as topology_file
from inductor_passes.fused.kernels import availability
from inductor_passes.graph_pass import ScheduleOptions
from inductor_passes.pass_options import PassOptions, extra_options

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
ENTRY = re.compile(r"^(\w[\w, ]*): (.*(?:\n {4}.*)*)", re.MULTILINE)
EXTENSIONS = (
    ("inductor_passes", "register"),
    ("inductor_passes", "register_extension"),
    ("inductor_passes", "register_topology"),
    ("dynamo_dist.sharding", "register_rows"),
    ("dynamo_dist.sharding", "register_strategy"),
    ("dynamo_dist.trackers", "trace_instead"),
    ("dynamo_dist.plugins", "register_frame_compiler"),
)
WITHOUT_A_BACKEND = (
    ("dynamo_dist", "enable"),
    ("dynamo_dist", "disable"),
    ("inductor_passes", "install"),
    ("inductor_passes", "uninstall"),
    ("inductor_passes", "options"),
    ("inductor_passes", "communication_pass"),
)
VARIABLES = {
    settings.INDUCTOR: (
        'Set to 1: compiles by `backend="inductor"` are as by `backend="dynamo_dist"` from the '
        "first `torch.compile` on; the same on all ranks."
    ),
    settings.TRACKERS_OFF: (
        "Trackers to leave to upstream, to find which one is at fault: "
        f"{', '.join(settings.TRACKER_NAMES)}."
    ),
    settings.AGREEMENT_SECONDS: (
        "How long a rank waits for others to compile the same graph; 0 settles nothing: the "
        'program\'s order, nothing merged. With `compile="shared"` also how long a compile may '
        "stand in one function before others compile for themselves."
    ),
    availability.SECONDS_VARIABLE: (
        "About how long a fused kernel waits for a peer before it gives up with an error (450, at "
        "most 466); alike on all ranks."
    ),
    plugins.OFF: (
        "Names of plugins, separated by commas, that are not loaded; the same on all ranks."
    ),
}


def prose(text: str) -> str:
    """A docstring's paragraph as Markdown on one line."""
    return " ".join(text.split()).replace("``", "`")


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
            "numerics": pass_.numerics.value,
            "summary": summary(pass_),
            "note": of_all,
        }


def commands() -> Iterator[tuple[str, str]]:
    """Every command's name and its ``--help``, in a terminal of 100 columns."""
    for module in (of_dynamo_dist, of_inductor_passes):
        yield from _below(module.parser())


def _below(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                sub.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=100)
                yield sub.prog, sub.format_help().rstrip()
                yield from _below(sub)


def calls(functions: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Functions as they are called, and what each does."""
    for module, name in functions:
        function = getattr(importlib.import_module(module), name)
        parameters = inspect.signature(function).parameters.values()
        bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
        yield f"{module}.{name}{inspect.Signature(bare)}", summary(function)


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


def breaks() -> Iterator[tuple[str, str, str]]:
    """Name, cause and fix of every break that the catalog knows; a break's own words stand as
    names.
    """
    for cause in CATALOG:
        yield cause.name, re.sub(r"\$(\w+)", r"*\1*", cause.why), cause.fix


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
    reference = environment.get_template("reference.md.j2").render(
        options=options(),
        schedule=described(ScheduleOptions),
        passes=passes(),
        pin=order_pinning.NAME,
        commands=commands(),
        variables=VARIABLES,
        logs=LOG_NAMES,
        artifacts=ARTIFACTS,
        plugin_group=registry.PLUGIN_GROUP,
        extensions=calls(EXTENSIONS),
        without_a_backend=calls(WITHOUT_A_BACKEND),
        errors={
            "dynamo_dist.errors": errors(dynamo_dist.errors),
            "inductor_passes.errors": errors(inductor_passes.errors),
        },
        topology=topology(),
    )
    graph_breaks = environment.get_template("graph-breaks.md.j2").render(breaks=breaks())
    return {
        name: text.rstrip() + "\n"
        for name, text in (("reference.md", reference), ("graph-breaks.md", graph_breaks))
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
