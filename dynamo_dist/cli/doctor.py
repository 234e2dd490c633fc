"""``python -m dynamo_dist doctor``: what this installation can do, and what it cannot and why.

``--json`` prints one object::

    {"supported": bool,          torch's version is among the supported ones
     "enabled": bool,            enable() is in force in this process
     "versions": {name: str or null},             null: not installed
     "probes": [{"name", "holds", "meaning"}],    what this torch has, as our code asks for it
     "trackers": [str],          those that enable() would install
     "passes": [str],            those that the pipeline would run, third parties' included
     "degraded": [{"what", "why", "fix"}]}

With ``--changes``, what ``enable()`` changes in torch instead, an entry a kind of place, the worst
to lose first::

    {"place": str, "places": int, "lost": str, "upstream": str, "versions": str, "made_by": [str],
     "what": "patch" or "setting"}

and with ``--all`` too, each change::

    {"places": [str], "how": str, "why": str, "made_by": str, "versions": str, "issue": str,
     "what": "patch", "setting" or "own state"}

The exit status is 0, or 1 where torch is not supported.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

import inductor_passes
from dynamo_dist import settings
from dynamo_dist.errors import ConfigError
from dynamo_dist.settings import TRACKER_NAMES, TRACKERS_OFF, DistConfig
from dynamo_dist.torch_compat import patching
from inductor_passes import registry
from inductor_passes.cli import print_entries
from inductor_passes.extension import Degraded
from inductor_passes.plugins import OFF

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_dist.patches import Kind, Listed

PROBE_MEANINGS = {
    "custom_class_names": "opaque objects are called custom classes (torch 2.14)",
    "getattro_protocol": "trackers answer tp_getattro_impl instead of var_getattr (torch 2.14)",
    "short_log_names": "TORCH_LOGS understands dist (package installed)",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """One question to this torch, with the answer."""

    name: str
    holds: bool
    meaning: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings that ``doctor`` prints; the module's docstring explains the fields."""

    supported: bool
    enabled: bool
    versions: dict[str, str | None]
    probes: tuple[Probe, ...]
    trackers: tuple[str, ...]
    passes: tuple[str, ...]
    degraded: tuple[Degraded, ...]


def diagnose(torch_version: str | None = None) -> Diagnosis:
    """Look at this process. ``torch_version`` stands in for torch's own, for a test."""
    found = {
        name: _version(name) for name in ("dynamo-dist", "torch", "triton", "rich", "transformers")
    }
    if torch_version is not None:
        found["torch"] = torch_version
    supported = found["torch"] is not None and settings.is_supported(found["torch"])
    config, misconfigured = _config()
    probes = _probes() if supported else ()
    passes, failures = _passes() if supported else ((), ())
    return Diagnosis(
        supported=supported,
        enabled=patching.is_enabled(),
        versions={"python": platform.python_version(), **found},
        probes=probes,
        trackers=tuple(n for n in TRACKER_NAMES if supported and n not in config.trackers_off),
        passes=passes,
        degraded=(*misconfigured, *_degraded(found, supported, config, probes), *failures),
    )


def _config() -> tuple[DistConfig, tuple[Degraded, ...]]:
    try:
        return DistConfig.from_env(), ()
    except ConfigError as error:
        return DistConfig(), (Degraded("enable()", f"{error.what} {error.why}", error.fix),)


def _version(distribution: str) -> str | None:
    if distribution == "torch":
        return torch.__version__
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _probes() -> tuple[Probe, ...]:
    # Only on a supported torch: elsewhere this import may fail, and that is what we report.
    from dynamo_dist.torch_compat import dynamo_building

    answers = dynamo_building.probes()
    return tuple(Probe(name, answers[name], meaning) for name, meaning in PROBE_MEANINGS.items())


def _passes() -> tuple[tuple[str, ...], tuple[Degraded, ...]]:
    # Only on a supported torch: elsewhere these imports may fail, and that is what we report.
    from dynamo_dist import plugins

    names = tuple(inductor_passes.registered_passes())
    return names, tuple(
        Degraded(f"plugin {name}", why, f"Repair it, uninstall its package, or set {OFF}={name}.")
        for name, why in (
            *inductor_passes.plugin_failures().items(),
            *plugins.plugin_failures().items(),
        )
    )


def _degraded(
    found: dict[str, str | None], supported: bool, config: DistConfig, probes: tuple[Probe, ...]
) -> list[Degraded]:
    if not supported:
        return [
            Degraded(
                "everything",
                f"torch {found['torch']} is not supported; {settings.SUPPORTED} are.",
                "Install a supported torch.",
            )
        ]
    problems = [lack for extension in registry.extensions() for lack in extension.degraded()]
    if not _has_accelerator():
        problems.append(
            Degraded(
                "GPU kernels and measured GPU times",
                "torch sees no CUDA device.",
                "Nothing to do on a CPU machine: graphs compile, GPU times are modelled.",
            )
        )
    if not _is_installed():
        problems.append(
            Degraded(
                'torch.compile(backend="dynamo_dist") by name',
                "the package is on the path but not installed, so its entry points are unknown.",
                "pip install dynamo-dist, or pip install -e . in a checkout.",
            )
        )
    problems += [
        Degraded(
            "short names in TORCH_LOGS",
            "torch loads no plugins under TORCH_DEVICE_BACKEND_AUTOLOAD=0.",
            'Name the module: TORCH_LOGS="+dynamo_dist.activation".',
        )
        for probe in probes
        if probe.name == "short_log_names" and not probe.holds
    ]
    problems += [
        Degraded(f"tracker {name}", f"{TRACKERS_OFF}={os.environ[TRACKERS_OFF]}", "Unset it.")
        for name in sorted(config.trackers_off)
    ]
    return problems


def _has_accelerator() -> bool:
    return torch.cuda.is_available()


def _is_installed() -> bool:
    group = settings.BACKEND.group
    return any(point.name == settings.BACKEND.name for point in metadata.entry_points(group=group))


def to_json(diagnosis: Diagnosis) -> str:
    """The documented object, indented."""
    return json.dumps(dataclasses.asdict(diagnosis), indent=2)


def render(diagnosis: Diagnosis, console: Console) -> None:
    """The same for a reader."""
    state = "supported" if diagnosis.supported else f"NOT supported ({settings.SUPPORTED} are)"
    console.print(f"torch {diagnosis.versions['torch']} is {state}", highlight=False)
    table = Table("package", "version", title="Versions", title_justify="left")
    for name, version in diagnosis.versions.items():
        table.add_row(name, version or "absent")
    console.print(table)
    if diagnosis.probes:
        table = Table("probe", "holds", "meaning", title="This torch", title_justify="left")
        for probe in diagnosis.probes:
            table.add_row(probe.name, "yes" if probe.holds else "no", probe.meaning)
        console.print(table)
    console.print(f"Trackers: {', '.join(diagnosis.trackers) or 'none'}", highlight=False)
    console.print(f"Passes:   {', '.join(diagnosis.passes) or 'none'}", highlight=False)
    if diagnosis.degraded:
        console.print("Off or degraded:")
        print_entries(console, ((each.what, (each.why, each.fix)) for each in diagnosis.degraded))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``doctor``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--changes",
        dest="patches",
        action="store_true",
        help="what enable() changes in torch, and why",
    )
    parser.add_argument("--all", action="store_true", help="with --changes: every place")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis, or the changes; the exit status."""
    diagnosis = diagnose()
    if arguments.patches and diagnosis.supported:
        return _print_patches(arguments.json, arguments.all)
    if arguments.json:
        print(to_json(diagnosis))
    else:
        render(diagnosis, Console())
    return 0 if diagnosis.supported else 1


def _print_patches(as_json: bool, is_all: bool) -> int:
    # Only on a supported torch, as above.
    from dynamo_dist import patches

    kinds, places = patches.kinds(), patches.listed() if is_all else []
    if as_json:
        found = places if is_all else kinds
        print(json.dumps([dataclasses.asdict(each) for each in found], indent=2))
        return 0
    console = Console()
    count, options = (sum(k.what == what for k in kinds) for what in ("patch", "setting"))
    console.print(
        f"enable() changes {count} kinds of places of torch and {options} settings, in order; "
        "disable() undoes them",
        highlight=False,
    )
    if is_all:
        print_entries(console, (("\n".join(e.places), _lines(e)) for e in places))
    else:
        _print_table(console, kinds)
    return 0


def _print_table(console: Console, kinds: Sequence[Kind]) -> None:
    """Print one line a kind, cut to the terminal."""
    rows = [("without it", "upstream", "torch", "place")]
    for kind in kinds:
        more = f" and {kind.places - 1} more" if kind.places > 1 else ""
        rows.append((kind.lost, kind.upstream, kind.versions, kind.place + more))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(map(str.ljust, row, widths)).rstrip()
        console.print(line, highlight=False, markup=False, no_wrap=True, overflow="ellipsis")


def _lines(patch: Listed) -> Iterator[str]:
    yield patch.how
    if patch.why:
        yield patch.why
    seen = f"seen in {patch.versions}" if patch.versions else ""
    yield ", ".join(filter(None, (patch.made_by, seen, patch.issue)))
