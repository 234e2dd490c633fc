"""Invariants that must hold after every pass, and postconditions that passes share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.errors import InvariantError, PreconditionError
from inductor_passes.graph.aliasing import written_to_input
from inductor_passes.graph.collectives import (
    group_name,
    is_launch,
    is_of_host_copy,
    is_wait,
    launches,
    loose_users,
    waits_of,
)
from inductor_passes.graph.printing import user_line

_FIX = "Report it to the author of the pass, or leave it out with options={'disable': ['%s']}."


def _broken(name: str, node: fx.Node | None, what: str) -> InvariantError:
    where = ""
    if node is not None:
        line = user_line(node)
        where = f"Node %{node.name}" + (f", from {line}." if line else ".")
    return InvariantError(f"The pass {name} broke the graph: {what}.", where, _FIX % name)


@dataclass(frozen=True)
class Communication:
    """The launches of a graph before a pass, to compare with those after it."""

    order: tuple[fx.Node, ...]
    groups: dict[fx.Node, str]
    wait_counts: dict[fx.Node, int]
    loose_users: dict[fx.Node, frozenset[fx.Node]]

    @classmethod
    def of(cls, graph: fx.Graph) -> Communication:
        """Snapshot of ``graph``."""
        order = tuple(launches(graph))
        return cls(
            order=order,
            groups={node: group_name(node) for node in order},
            wait_counts={node: len(waits_of(node)) for node in order},
            loose_users={node: frozenset(loose_users(node)) for node in order},
        )


def check_communication(
    before: Communication, graph: fx.Graph, name: str, *, keeps_launch_order: bool
) -> None:
    """Every launch waited as often as before (new ones once a tensor), nothing read before its
    wait.

    With ``keeps_launch_order`` the surviving launches of each group stand in their old order: ranks
    match collectives of a group by order alone, so a change that ranks do not share hangs.
    """
    try:
        graph.lint()
    except RuntimeError as error:
        raise _broken(name, None, f"graph.lint() says {error}") from error
    after = launches(graph)
    for launch in after:
        waits = len(waits_of(launch))
        expected = before.wait_counts.get(launch)
        if expected is None:
            expected = len(_outputs(launch))
        if waits != expected:
            raise _broken(name, launch, f"the launch has {waits} waits instead of {expected}")
        loose = set(loose_users(launch)) - before.loose_users.get(launch, frozenset())
        for user in loose:
            raise _broken(name, user, f"it reads %{launch.name} without waiting for it")
    if keeps_launch_order:
        survivors = set(after)
        for group in dict.fromkeys(before.groups.values()):
            old = [n for n in before.order if n in survivors and before.groups[n] == group]
            new = [n for n in after if n in before.groups and before.groups[n] == group]
            if old != new:
                first = next(b for a, b in zip(old, new, strict=True) if a is not b)
                raise _broken(name, first, f"launches of group {group} changed their order")


def _outputs(launch: fx.Node) -> list[object]:
    value = launch.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def check_functional(graph: fx.Graph, name: str) -> None:
    """Refuse a graph that mutates a value, because moving nodes past a mutation changes numbers.

    The copies back into graph inputs that functionalization leaves at the end are harmless.
    """
    writes = epilogue(graph)
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if is_launch(node) or is_wait(node) or is_of_host_copy(node):
            continue
        if node.target._schema.is_mutable and node not in writes:
            raise PreconditionError(
                f"{name} needs a functional graph, but %{node.name} = {node.target}(...) mutates "
                f"an input{_at(node)}.",
                "Moving a node across a mutation changes what it reads.",
                f"Run it before reinplacing, or leave {name} out with "
                f"options={{'disable': ['{name}']}}.",
            )


def epilogue(graph: fx.Graph) -> dict[fx.Node, None]:
    """Return the copies into graph inputs that end the graph, last first; only the output follows
    them.
    """
    found: dict[fx.Node, None] = {}
    for node in reversed(graph.nodes):
        if node.op == "output":
            continue
        if written_to_input(node) is None:
            break
        found[node] = None
    return found


def _at(node: fx.Node) -> str:
    line = user_line(node)
    return f" ({line})" if line else ""
