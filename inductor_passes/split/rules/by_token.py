"""Which rule holds where values are routed by token, or counted: those of rows, of counts, or as if they were whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from inductor_passes.graph.edit import aten
from inductor_passes.split.rules import counting, routed, routing, runs
from inductor_passes.split.rules.counting import keys_of
from inductor_passes.split.rules.places import Cut, EndsError, InParts, Place
from inductor_passes.split.rules.rows import Addends, Routed, keys_behind
from inductor_passes.split.rules.rule import Rule, extents, source_of

Places = Mapping[fx.Node, Place]
_ROW_RULES: dict[object, Rule] = {**routed.RULES, **routing.RULES, **runs.RULES}
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)


def step_by_token(
    node: fx.Node, places: Places, parts: int, whole: Collection[fx.Node]
) -> InParts | None:
    """Return how a node is computed that reads routed values or counts, or makes them; None: as if they were whole.

    ``whole``: keys that are sorted and counted whole. Raises EndsError with the reason.
    """
    special = [p for p in places.values() if not isinstance(p, (Cut, tuple))]
    if not special:
        return _started(node, places, parts, whole)
    if any(isinstance(p, Routed) for p in special):
        return _of_rows(node, places, parts, whole)
    found = (counting.RULES.get(node.target), _ROW_RULES.get(node.target))
    reason = "it reads what all parts count together, a number of the whole batch"
    for rule in found:
        try:
            if rule is not None:
                return rule(node, places, parts)
        except EndsError as error:
            reason = str(error)
    if any(isinstance(place, Cut) for place in places.values()):
        return None
    raise EndsError(reason)


def _of_rows(node: fx.Node, places: Places, parts: int, whole: Collection[fx.Node]) -> InParts:
    if (counted := _counted(node, places, parts, whole)) is not None:
        return counted
    rule = _ROW_RULES.get(node.target) or routed.rule_of_rows(node.target)
    return rule(node, places, parts)


def _started(
    node: fx.Node, places: Places, parts: int, whole: Collection[fx.Node]
) -> InParts | None:
    """Sort or count what lies in ordinary parts."""
    if node.target in SORTS:
        source = source_of(node)
        place = places.get(source)
        if isinstance(place, Cut) and len(extents(source)) == 1 and keys_of(source) not in whole:
            return _ROW_RULES[node.target](node, places, parts)
        return None
    return _counted(node, places, parts, whole)


def _counted(
    node: fx.Node, places: Places, parts: int, whole: Collection[fx.Node]
) -> InParts | None:
    rule = counting.COUNTING.get(node.target)
    if rule is None:
        return None
    try:
        step = rule(node, places, parts)
    except EndsError:
        return None
    counts = step.out.counts if isinstance(step.out, Addends) else None
    if counts is None or counts.keys in whole or keys_behind(counts.rows) in whole:
        return None
    return step
