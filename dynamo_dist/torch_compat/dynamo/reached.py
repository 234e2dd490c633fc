"""Objects that no variable of the program holds, and how a frame comes to them from what it does hold.

Dynamo names them in the globals of the frame, by their address. In another process the same way leads to that process' object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dynamo_dist.torch_compat.dynamo import calls


@dataclass(frozen=True, slots=True)
class Reached:
    """``find(origin)``, of the value at ``source``, is the object. Functions are importable, for another process calls them.

    ``read(object, origin)``: what the trace depends on and no guard asks, as constants. ``begin(object, origin)``: called before
    a frame that was not traced here is compiled, to do what a trace would have done; it raises CannotKeep if that does not go.
    ``held``: it is made anew once others are read, and nobody else holds it.
    """

    find: Callable[[Any], Any]
    source: Any
    read: Callable[[Any, Any], Any] | None = None
    begin: Callable[[Any, Any], None] | None = None
    held: bool = False


def note(
    tx: Any,
    value: object,
    find: Callable[[Any], Any],
    tracker: Any,
    read: Callable[[Any, Any], Any] | None = None,
    begin: Callable[[Any, Any], None] | None = None,
) -> None:
    """Note that ``find`` of what ``tracker`` stands for is ``value``, which ``build_by_weakref`` tracks.

    Without a source of the tracker nothing is.
    """
    if tracker.source is None:
        return
    known: dict[str, Reached] = calls.trace_state(tx, dict, _NOTES)
    name = tx.store_global_weakref_by_id("__dynamo_dist", value)
    before = known.pop(name, Reached(find, tracker.source))
    if read is None:
        known[name] = before
    else:
        known[name] = Reached(find, tracker.source, read, begin or before.begin)


def note_made(tx: Any, value: object, make: Callable[[Any], Any], owner: object) -> None:
    """Note that ``make``, of what leads to ``owner``, makes what ``build_unchanging`` tracks as ``value``; nothing if nothing is known of that."""
    known = noted(tx.output)
    of = known.get(tx.store_global_weakref_by_id("__dynamo_dist", owner))
    if of is not None:
        name = tx.output.install_global_by_id("__dynamo_dist", value)
        known[name] = Reached(make, of.source, held=True)


def noted(output: Any) -> dict[str, Reached]:
    """What was noted for a graph, by the names of the objects in the frame's globals, in order."""
    found: dict[str, Reached] = vars(output).get(_NOTES, {})
    return found


_NOTES = "_dynamo_dist_reached"
