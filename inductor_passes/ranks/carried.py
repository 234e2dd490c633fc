"""Stream and settled plan of a graph, carried by the code that was made of it.

Inductor's caches bring compiled code without calling a pass, but count again what was counted while it was
compiled. So the stream and the plan of a graph are the name of such a count: they cannot be lost apart from the code.
"""

from __future__ import annotations

import json
import logging
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, replace

from inductor_passes.ranks.collective_trace import VERSION, Group, Stream
from inductor_passes.torch_compat import c10d, caches

log = logging.getLogger(__name__)

PREFIX = "inductor_passes.order."


@dataclass(frozen=True, slots=True)
class Carried:
    """The stream of a graph of compiled code, and the plan by which the code launches."""

    stream: Stream
    plan: str


def count(stream: Stream, plan: str) -> None:
    """Let the code that is being made carry these."""
    groups = tuple(Group(c10d.common_name(g.name), g.ranks) for g in stream.groups)
    data = json.dumps([VERSION, replace(stream, groups=groups).to_json(), plan])
    name = PREFIX + urlsafe_b64encode(zlib.compress(data.encode())).decode()
    caches.counters()[name] += 1


class Counts:
    """The counts at one moment, to know by which code came since."""

    def __init__(self) -> None:
        self._before = _now()

    def since(self) -> list[Carried]:
        """List streams and plans of code that was made or loaded since, in the order in which ranks settle them.

        That is a joint graph before its halves, a forward graph before its backward one: a cache counts in any order.
        Damaged counts are left out, with a line.
        """
        found = []
        for name, number in _now().items():
            if number > self._before.get(name, 0) and (carried := _read(name)) is not None:
                found.append(carried)
        return sorted(found, key=lambda each: (bool(each.stream.joint), each.stream.backward))


def _now() -> dict[str, int]:
    return {name: n for name, n in caches.counters().items() if name.startswith(PREFIX)}


def _read(name: str) -> Carried | None:
    try:
        packed = urlsafe_b64decode(name.removeprefix(PREFIX))
        version, stream, plan = json.loads(zlib.decompress(packed))
        if version != VERSION:
            raise ValueError(f"version {version!r}")
        return Carried(_with_own_groups(Stream.from_json(stream)), str(plan))
    except (ValueError, TypeError, zlib.error, RecursionError) as error:
        log.warning("What a compiled graph from the cache launches cannot be read: %s", error)
        return None


def _with_own_groups(stream: Stream) -> Stream:
    """The stream with the groups as they are in this process: another rank may have stored it."""
    names = (c10d.own_name(group.name) for group in stream.groups)
    groups = tuple(
        Group(name, c10d.real_group_ranks(name) or group.ranks)
        for name, group in zip(names, stream.groups, strict=True)
    )
    return replace(stream, groups=groups)
