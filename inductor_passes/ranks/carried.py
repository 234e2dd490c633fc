"""Keep with compiled code what its ranks have agreed on: its trace, its plan, and their choices.

Inductor's caches bring compiled code without calling a pass, but count again what was counted while
it was compiled. So what code carries is the name of such a count: it cannot be lost apart from the
code.

A counter is an odd place for data, but every other one asks more of torch (looked at in 2.13 and
2.14):

- An attribute of the ``CompiledFxGraph``. Inductor pickles its entry before ``compile_fx_inner``
  returns, so what is set then is lost, except in bundled entries of AOTAutograd's cache. To set it
  in time takes a patch of ``FxGraphCache._save_graph``; to read it where AOTAutograd's cache hits,
  which returns a closure, one of ``cache_hit_post_compile``.
- An object that unpickling calls back. Torch unpickles all entries of a key until the guards of one
  hold; those that it rejects would call too.
- A file by the entry's key. The key of a hit in AOTAutograd's bundled cache is its own, Inductor's
  remote cache knows no file of ours, and ``save_cache_artifacts`` takes only registered types.
- Another field of the entry. Of all that it holds, a pass can write the counters alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from inductor_passes.ranks.collective_trace import CollectiveTrace, Group, packed, unpacked
from inductor_passes.torch_compat import c10d, caches

log = logging.getLogger(__name__)
T = TypeVar("T")

PREFIX = "inductor_passes.order."
CHOICE = "inductor_passes.choice."


@dataclass(frozen=True, slots=True)
class Carried:
    """The trace of a graph of compiled code, and the plan by which the code launches."""

    trace: CollectiveTrace
    plan: str


@dataclass(frozen=True, slots=True)
class SharedChoice:
    """What all ranks do as the first of them has chosen. ``about``: what it is about, by which
    ranks find each other.
    """

    about: str
    text: str


def count(trace: CollectiveTrace, plan: str) -> None:
    """Let the code that is being made carry these."""
    groups = tuple(Group(c10d.common_name(g.name), g.ranks) for g in trace.groups)
    caches.counters()[PREFIX + packed([replace(trace, groups=groups).to_json(), plan])] += 1


def count_choice(choice: SharedChoice) -> None:
    """Let the code that is being made carry a choice."""
    caches.counters()[CHOICE + packed([choice.about, choice.text])] += 1


class Counts:
    """The counts at one moment, to know by which code came since.

    Damaged ones are left out, with a log line.
    """

    def __init__(self) -> None:
        self._before = dict(caches.counters())

    def since(self) -> list[Carried]:
        """List traces and plans of code made or loaded since, in the order in which ranks agree.

        A joint graph comes before its halves, and a forward graph before its backward one. The list
        is sorted because a cache counts in any order.
        """
        found = self._new(PREFIX, _carried)
        return sorted(found, key=lambda each: (bool(each.trace.joint), each.trace.backward))

    def choices_since(self) -> list[SharedChoice]:
        """List the choices of code made or loaded since."""
        return list(self._new(CHOICE, lambda values: SharedChoice(*map(str, values))))

    def _new(self, prefix: str, read: Callable[[Any], T]) -> Iterator[T]:
        for name, number in list(caches.counters().items()):
            if name.startswith(prefix) and number > self._before.get(name, 0):
                try:
                    yield read(unpacked(name.removeprefix(prefix)))
                except (ValueError, TypeError) as error:
                    log.warning("What compiled code from a cache carries cannot be read: %s", error)


def _carried(values: Any) -> Carried:
    trace, plan = values
    return Carried(_with_own_groups(CollectiveTrace.from_json(trace)), str(plan))


def _with_own_groups(trace: CollectiveTrace) -> CollectiveTrace:
    """The trace with the groups as they are in this process: another rank may have stored it."""
    names = (c10d.own_name(group.name) for group in trace.groups)
    groups = tuple(
        Group(name, c10d.real_group_ranks(name) or group.ranks)
        for name, group in zip(names, trace.groups, strict=True)
    )
    return replace(trace, groups=groups)
