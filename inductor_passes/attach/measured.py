"""Measured times of the places in a program that graphs are compiled for: adopted in this job, or kept by one before."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Mapping

from inductor_passes.agree import orders
from inductor_passes.agree.store import Steps, StoreFailedError, Swap
from inductor_passes.errors import TimesError
from inductor_passes.files.whole import write_whole
from inductor_passes.machine.times.file import of_text, read, to_text
from inductor_passes.machine.times.times import Times, TunedStep
from inductor_passes.torch_compat import c10d, caches

log = logging.getLogger(__name__)

_NONE = "-"
# In the stead of a place: what all graphs of a job show of its machine, for who asks before there is a graph.
EVERYWHERE = "everywhere"
# Tables by place, of the job whose orders stand beside them.
_tables: dict[str, Times] = {}
_kept: dict[str, Times | None] = {}
_asked: list[bool] = []
_job: list[object] = []


def adopt(tables: Mapping[str, Times]) -> None:
    """Price graphs that are compiled from now on by these; the same on all ranks. None of before stays."""
    _of_this_job()
    _tables.clear()
    _tables.update(tables)
    if tables and (everywhere := of_all(tables)) is not None:
        _tables[EVERYWHERE] = everywhere


def of_all(tables: Mapping[str, Times]) -> Times | None:
    """One table of all graphs; None where they were not measured on one machine."""
    found = [times for place, times in sorted(tables.items()) if place != EVERYWHERE]
    if len({(times.machine, times.torch, times.world) for times in found}) != 1:
        return None
    graphs = {name: graph for times in found for name, graph in times.graphs.items()}
    launches = {launch for graph in graphs.values() for launch in graph.launches.values()}
    probes = tuple(probe for probe in found[0].probes if probe not in launches)
    return dataclasses.replace(found[0], graphs=graphs, probes=probes)


def adopted() -> Mapping[str, Times]:
    """The tables that count now, by place."""
    _of_this_job()
    return {place: times for place, times in _tables.items() if place != EVERYWHERE}


def times_of(place: str, costs: str) -> Times | None:
    """The table of a place: adopted by this job, or, if ``costs`` is ``measured``, kept by one before; else None.

    The rank that comes first with a place says what all use there, whatever files they have.
    """
    _of_this_job()
    if costs == "measured" and place != EVERYWHERE:
        _asked[:] = [True]
    if place in _tables:
        return _tables[place]
    if costs != "measured":
        return None
    if place not in _kept:
        _kept[place] = _agreed(place)
    return _kept[place]


def is_asked() -> bool:
    """Return whether a graph of this job was compiled with ``costs="measured"``."""
    _of_this_job()
    return bool(_asked)


def keep(tables: Mapping[str, Times], outcome: TunedStep | None = None) -> None:
    """Write tables beside the cache, for the next job, and what they were good for."""
    everywhere = of_all(tables) if tables else None
    for place, times in (*tables.items(), *([(EVERYWHERE, everywhere)] if everywhere else [])):
        path = path_of(place)
        try:
            write_whole(path, to_text(times, outcome))
        except OSError as error:
            log.warning("Measured times could not be kept in %s: %s.", path, error)


def path_of(place: str) -> str:
    """The file of a place under this torch and in a job of so many ranks."""
    world = c10d.world_size() or 1
    name = hashlib.sha256(repr([place, caches.torch_version(), world]).encode()).hexdigest()[:24]
    inside = (EVERYWHERE,) if place == EVERYWHERE else ()
    return os.path.join(folder(), *inside, f"{name}.json")


def folder() -> str:
    """The folder of all tables, beside Inductor's cache."""
    return os.path.join(caches.cache_dir(), "inductor_passes", "times")


def forget() -> None:
    """Price by the topology again; files stay."""
    _tables.clear()
    _kept.clear()
    _asked.clear()


def _agreed(place: str) -> Times | None:
    """The table that the first rank of the job to come has in its file."""
    job = orders.current()
    path = path_of(place)
    own = _read(path) if os.path.exists(path) else None
    if job is None:
        return own
    try:
        text = job.ask(_first(f"times/{place}", _NONE if own is None else to_text(own)))
        return None if text == _NONE else of_text(text)
    except (StoreFailedError, TimesError) as error:
        log.warning("Measured times are not used: ranks could not settle on a table (%s).", error)
        return None


def _first(key: str, mine: str) -> Steps[str]:
    held: str = yield Swap(key, "", mine)
    return held


def _read(path: str) -> Times | None:
    return read(path, torch=caches.torch_version(), world=c10d.world_size() or 1)


def _of_this_job() -> None:
    """Forget what another job of this process has adopted."""
    job = orders.current()
    if _job != [job]:
        _job[:] = [job]
        forget()
