"""Ids of compiled graphs in this process: Dynamo's where it made the graph, numbers of our own for all others.

Graphs come without Dynamo from ``make_fx``, AOTAutograd or ``compile_fx`` called directly. They are numbered as they
come, like Dynamo numbers functions, so that ranks which compile the same graphs give them the same ids.
"""

from __future__ import annotations

import itertools

from inductor_passes.torch_compat import dynamo

_OURS = "fx"
_numbers = itertools.count()


def compile_id() -> str:
    """Return the id of the compile in work: ``0/0`` by Dynamo, else ``fx0``, ``fx1``, ...

    Within one trace of AOTAutograd's it is the same each time, in the backward graph too; outside of any each call
    counts one further.
    """
    if found := dynamo.compile_id():
        return found
    trace = dynamo.trace_in_work()
    known = getattr(trace, "dist_graph_id", None)
    if known is not None:
        return str(known)
    made = f"{_OURS}{next(_numbers)}"
    if trace is not None:
        trace.dist_graph_id = made
    return made


def in_this_process(graph_id: str) -> str:
    """Return the id of a graph that another process has compiled, with a number of this one where it has a number."""
    name, _, phase = graph_id.rpartition(":")
    return f"{compile_id()}:{phase}" if name.startswith(_OURS) else graph_id
