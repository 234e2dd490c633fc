"""List what ``enable()`` changes in torch: where, how, why, and in which versions it was seen.

The list is made by the functions that make the changes, and its sentences are theirs: how is the first
of the function's docstring, why the first of the module that asks for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from dynamo_dist import activation
from dynamo_dist.config import DistConfig
from dynamo_dist.losses import HOOK, LOSSES
from dynamo_dist.torch_compat import dtensor_dispatch, dynamo_compiler
from dynamo_dist.torch_compat.patching import ConfigDefault, OwnState, SetAttribute, makers_noted
from dynamo_dist.versions import SUPPORTED

OWN_STATE = "own state"

_GROUPING = (__name__, "dynamo_dist.activation", "dynamo_dist.cli.doctor")
_ISSUE = re.compile(r"(?:https://github\.com/)?pytorch/pytorch(?:/issues/|/pull/|#)\d+")
_VERSIONS = re.compile(
    r"\b(?:[Ss]een|are there|is there)[^.]*?\b(2\.\d+(?:\s+(?:to|and)\s+2\.\d+)?)"
)


@dataclass(frozen=True, slots=True)
class Listed:
    """Changes of one kind: places of torch that one function changes for one reason."""

    places: tuple[str, ...]
    how: str
    why: str
    made_by: str
    versions: str  # "2.13 to 2.15"; empty where it is not said
    issue: str  # of upstream; empty where there is none
    what: str = "patch"  # or "setting", of torch's configuration, or "own state"


@dataclass(frozen=True, slots=True)
class Kind:
    """Changes of torch in one kind of place: by one function, or in the very same places. ``place``: the first.

    ``lost``: what a user would lose without. ``upstream``: an issue, or why there is none.
    """

    place: str
    places: int
    lost: str
    upstream: str
    versions: str
    made_by: tuple[str, ...]
    what: str


def kinds(config: DistConfig | None = None) -> list[Kind]:
    """What ``enable()`` changes in torch, an entry a kind of place, the worst to lose first; entries of tables are summed up."""
    found: dict[str, list[Listed]] = {}
    for each in listed(config):
        if each.what != OWN_STATE:
            found.setdefault(each.made_by, []).append(each)
    joined: dict[frozenset[str], list[Listed]] = {}
    for entries in found.values():
        joined.setdefault(frozenset(p for each in entries for p in each.places), []).extend(entries)
    order = [lost for lost, _ in LOSSES.values()]
    return sorted(
        map(_kind, joined.values()),
        key=lambda kind: order.index(kind.lost) if kind.lost in order else len(order),
    )


def _kind(entries: Sequence[Listed]) -> Kind:
    makers = tuple(dict.fromkeys(each.made_by for each in entries))
    names = (".".join(each.split(".")[-2:]) for each in makers)
    lost, why = next((LOSSES[n] for n in names if n in LOSSES), (entries[0].how, HOOK))
    return Kind(
        place=entries[0].places[0],
        places=sum(len(each.places) for each in entries),
        lost=lost,
        upstream=next((each.issue for each in entries if each.issue), why),
        versions=next((each.versions for each in entries if each.versions), SUPPORTED).removeprefix(
            "torch "
        ),
        made_by=makers,
        what=entries[0].what,
    )


def listed(config: DistConfig | None = None) -> list[Listed]:
    """Every change that ``enable()`` makes with ``config``, grouped, in order; nothing is applied."""
    with makers_noted():
        made = activation.changes(config or DistConfig.from_env())
    return [_listed(maker, reason, changes) for (maker, reason), changes in by_kind(made).items()]


def by_kind(made: Iterable[Any]) -> dict[tuple[str, str], list[Any]]:
    """Changes by the function that made them and the module that asked for them; made under ``makers_noted()``."""
    kinds: dict[tuple[str, str], list[Any]] = {}
    for change in made:
        kinds.setdefault(_maker_and_reason(change), []).append(change)
    return kinds


def _maker_and_reason(change: Any) -> tuple[str, str]:
    """The function that made it, and the module that asked for it, which says why."""
    names = [name for name, _ in _makers(change)]
    if not names:
        return _name(type(change)), type(change).__module__
    modules = [name.rpartition(".")[0] for name in names]
    asking = (each for each in modules if not _is_compat(each) and not each.endswith(".registry"))
    return names[0], next(asking, modules[-1])


def _is_compat(module: str) -> bool:
    return module.startswith("dynamo_dist.torch_compat.")


def _makers(change: Any) -> list[tuple[str, str]]:
    return [
        (name, doc)
        for name, doc in getattr(change, "makers", ())
        if name.startswith("dynamo_dist.") and name.rpartition(".")[0] not in _GROUPING
    ]


def _listed(maker: str, module: str, changes: Sequence[Any]) -> Listed:
    docs = [doc for _, doc in _makers(changes[0])] or [type(changes[0]).__doc__ or ""]
    text = " ".join(docs)
    versions, issue = _VERSIONS.search(text), _ISSUE.search(text)
    why = "" if _is_compat(module) else _sentence(sys.modules[module].__doc__ or "")
    # A list of changes says what its module is for.
    how = why if maker.endswith(".changes") else _sentence(docs[0])
    return Listed(
        places=tuple(_place(change) for change in changes),
        how=how,
        why="" if why == how else why,
        made_by=maker.removeprefix("dynamo_dist."),
        versions=re.sub(r"\s+", " ", versions[1]) if versions else "",
        issue=issue[0] if issue else "",
        what=_what(changes[0]),
    )


def _what(change: Any) -> str:
    if isinstance(change, OwnState):
        return OWN_STATE
    return (
        "setting" if isinstance(change, (ConfigDefault, dynamo_compiler.CacheKeyTag)) else "patch"
    )


def _sentence(doc: str) -> str:
    """The first of a docstring, on one line."""
    first = re.split(r"(?<=[.:])\s+(?=[A-Z`\"])|\n\n", doc.strip(), maxsplit=1)[0]
    return re.sub(r"\s+", " ", first).rstrip(":")


def _place(change: Any) -> str:
    if isinstance(change, SetAttribute):
        return f"{_name(change.owner)}.{change.name}"
    found = getattr(change, "of", getattr(change, "key", type(change)))
    return ", ".join(map(_name, found)) if type(found) is tuple else _name(found)


def _name(thing: Any) -> str:
    kind = type(thing)  # not isinstance: objects of torch warn when their class is asked for
    if issubclass(kind, (str, *dtensor_dispatch.OPERATORS)):
        return str(thing)
    if issubclass(kind, ModuleType):
        return str(thing.__name__)
    if issubclass(kind, (type, FunctionType, BuiltinFunctionType)):
        return f"{thing.__module__}.{thing.__qualname__}"
    return f"a {_name(kind)}"
