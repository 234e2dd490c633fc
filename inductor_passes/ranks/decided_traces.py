"""Streams of the job that this process knows: which plan each has, and which may meet which."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    CollectiveTrace,
    first_difference,
    is_same,
    may_meet,
    shares_launch,
)


@dataclass(slots=True)
class DecidedTrace:
    """Hold a trace that ranks have decided on, and its plan.

    ``plan``: a plan's text. ``ours``: whether a graph of this process has the trace. ``ended``:
    whether ranks could not agree: each launches it in the program's order, in graphs of its own.
    ``agreed_as``: the key by which all ranks know the plan. It differs from the trace's own key
    where this graph was compiled from further outside or inside. ``trace`` is of the last compile,
    with the callers of all. ``first`` is of the first one, which all ranks of a program make at the
    same place; they compile again at lengths of their own.
    """

    trace: CollectiveTrace
    plan: str
    agreed_as: str
    first: CollectiveTrace
    ours: bool = True
    ended: bool = False

    @property
    def is_reordered(self) -> bool:
        """Return whether its launches are others, or in another order, than the program's."""
        return self.plan != PROGRAM or (bool(self.trace.joint) and not self.ended)


class DecidedTraces:
    """Hold decided traces by key, and find equal ones seen from further outside or inside."""

    def __init__(self) -> None:
        self._known: dict[str, DecidedTrace] = {}
        self._by_content: dict[str, list[str]] = {}
        self._cut: set[str] = set()
        self._in_python: set[str] = set()  # functions, as some rank runs them
        self._left_here: set[str] = set()  # as this rank does

    def get(self, trace: CollectiveTrace, key: str) -> DecidedTrace | None:
        """Return the entry of this trace, or the same seen from elsewhere; None if undecided."""
        if (exact := self._known.get(key)) is not None:
            return exact
        if key != trace.key:
            return None
        same = (self._known[k] for k in self._by_content.get(trace.content, ()))
        return next((known for known in same if is_same(known.first, trace)), None)

    def has(self, key: str) -> bool:
        """Return whether this exact trace was decided, by this rank or by others."""
        return key in self._known

    def add(
        self,
        key: str,
        trace: CollectiveTrace,
        plan: str,
        *,
        ours: bool = True,
        ended: bool = False,
        agreed_as: str = "",
    ) -> None:
        """Record a decision. A trace of another rank does not replace a known one."""
        before = self._known.get(key)
        # A graph of this process may already run by the known plan.
        if before is not None and not ours:
            return
        if before is None:
            self._by_content.setdefault(trace.content, []).append(key)
        first = trace
        if before is not None and before.ours:
            # Code that was compiled for earlier callers still runs for them.
            callers = _all_callers(before.trace.callers, trace.callers)
            first, trace = before.first, replace(trace, callers=callers)
        self._known[key] = DecidedTrace(trace, plan, agreed_as or key, first, ours, ended)

    def meeting(
        self, trace: CollectiveTrace, but: str = "", *, whoever_calls: bool = False
    ) -> list[DecidedTrace]:
        """List decided traces that other ranks may run while this rank runs ``trace``.

        ``whoever_calls``: also those that were compiled for other calls. Without it, all ranks
        must run ``trace`` as one graph: who runs its function in Python may call them there.
        """
        return [
            known
            for key, known in self._known.items()
            if key != but and _may_meet(trace, known, whoever_calls)
        ]

    def keeps_order(self, trace: CollectiveTrace, key: str) -> bool:
        """Return whether ``trace`` launches in the program's order, because ranks may cut the
        program there.
        """
        # A backward graph is compiled before its forward one runs. Where ranks cut a function
        # differently, who has these launches in a later piece comes to them only behind others,
        # which would wait for this rank. And a function that ranks cut differently in training may
        # be cut so in an evaluation as well, later.
        cut = any(trace.is_of(root) for root in self._cut)
        return cut or bool(self.meeting(trace, key))

    def has_agreed_part(self, trace: CollectiveTrace) -> bool:
        """Return whether ranks agreed on a part of ``trace``, as a graph for other calls."""
        return any(
            known.ours and not known.ended and not may_meet(trace, known.first)
            for known in self.meeting(trace, whoever_calls=True)
        )

    def reordered(self, trace: CollectiveTrace, same: DecidedTrace | None) -> list[DecidedTrace]:
        """List traces with a plan that ranks may run instead of ``trace``, where not all run that.

        ``same``: the known entry of this trace, if it has to lose its plan.
        """
        meeting = self.meeting(trace, whoever_calls=True) + ([] if same is None else [same])
        found = {known.agreed_as: known for known in meeting if known.is_reordered}
        return list(found.values())

    def conflicts_with_callers(self, trace: CollectiveTrace, known: DecidedTrace) -> bool:
        """Return whether a graph that is compiled again is now called from a function that other
        ranks may run as one graph, where either has a plan of its own.

        ``known``: its entry.
        """
        # By lines and not by names alone: ranks compile again at lengths of their own, and must not
        # leave a plan alone because of another function of that name.
        before, anywhere = replace(trace, callers=known.trace.callers), replace(trace, callers=None)
        outer = [
            other
            for other in self._known.values()
            if trace.is_called_from(other.trace.root)
            and not before.is_called_from(other.trace.root)
            and shares_launch(anywhere, other.trace, whoever_calls=True)
        ]
        return bool(outer) and any(each.is_reordered for each in (known, *outer))

    def reordered_in(self, root: str, callers: Collection[str]) -> list[DecidedTrace]:
        """List traces with a plan that must not run in Python's call of a function, made now.

        Other ranks may run them instead of the function. Or this rank may call them from it, where
        others run a graph of it.
        """
        graphs = [
            known.trace
            for known in self._known.values()
            if known.ours and known.trace.may_be_in_place_of(root, callers)
        ]
        found = {
            known.agreed_as: known
            for known in self._known.values()
            if known.is_reordered
            and not known.trace.is_joint  # its halves are there
            and (
                known.trace.may_be_in_place_of(root, callers)
                or any(shares_launch(each, known.trace, whoever_calls=True) for each in graphs)
            )
        }
        return list(found.values())

    def plans_elsewhere(self, trace: CollectiveTrace) -> list[str]:
        """The plans of traces that launch the same at other places of the program.

        A rank may take the one place while others take the other, by the length of its batch, say.
        """
        own = (self._known[key] for key in self._by_content.get(trace.content, ()))
        return list(dict.fromkeys(known.plan for known in own if known.ours))

    def may_be_running(self, trace: CollectiveTrace) -> DecidedTrace | None:
        """Return a reordered trace that ranks may run which never reach ``trace``, or None.

        On each group of both traces, the launches of one are a prefix of the other's.
        """
        for known in self._known.values():
            if not known.is_reordered or known.trace.backward != trace.backward:
                continue
            if known.trace.is_joint != trace.is_joint:
                continue
            theirs = {group.id: number for number, group in enumerate(known.trace.groups)}
            pairs = [
                (trace.on(number), known.trace.on(theirs[group.id]))
                for number, group in enumerate(trace.groups)
                if group.id in theirs
            ]
            if any(a and b for a, b in pairs) and all(
                first_difference(a, b) is None for a, b in pairs
            ):
                return known
        return None

    def record_cut(self, root: str) -> None:
        """Note a function that ranks cut into different graphs."""
        self._cut.add(root)

    def leaves_to_python(self, root: str) -> bool:
        """Record that this rank runs a function in eager fallback; return whether it did before."""
        before = root in self._left_here
        self._left_here.add(root)
        self._cut.add(root)
        self._in_python.add(root)
        return before

    def record_in_python(self, root: str) -> None:
        """Record a function that another rank runs in eager fallback."""
        self._in_python.add(root)

    def is_left_to_python(self, trace: CollectiveTrace) -> bool:
        """Return whether some rank runs the function of ``trace`` in eager fallback.

        It need not be the function that was compiled: ``trace`` may only hold launches of it.
        """
        return any(trace.is_of(root) for root in self._in_python)

    def is_behind_python(self, trace: CollectiveTrace) -> bool:
        """Return whether a function that this rank has left to Python leads to ``trace``."""
        return any(trace.is_called_from(root) for root in self._left_here)

    def give_up(self, known: DecidedTrace) -> None:
        """Leave a trace the program's order from now on, and with it those that launch the same
        elsewhere.

        A joint graph that was cut goes with its halves, and they with it.
        """
        given_up = {known.trace.content}
        joint = known.trace.key if known.trace.is_joint else known.trace.joint
        if joint:
            given_up |= {
                each.trace.content
                for key, each in self._known.items()
                if joint in (key, each.trace.joint)
            }
        for content in given_up:
            for key in self._by_content[content]:
                self._known[key].plan, self._known[key].ended = PROGRAM, True

    def __len__(self) -> int:
        return len(self._known)


def _may_meet(trace: CollectiveTrace, known: DecidedTrace, whoever_calls: bool) -> bool:
    # Who is not in all groups of a launch that others make has a shorter trace of the same frame.
    meets = shares_launch if known.ended else may_meet
    return meets(trace, known.trace, whoever_calls=whoever_calls)


def _all_callers(
    one: Collection[str] | None, other: Collection[str] | None
) -> Collection[str] | None:
    return None if one is None or other is None else frozenset(one) | frozenset(other)
