"""Ways in which one rank's graph can launch: its passes, run freely, as a plan says, or without touching a launch."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import fx

from inductor_passes.agree.graph import plan_of
from inductor_passes.agree.plan import PROGRAM, LaunchPlan
from inductor_passes.agree.stream import Stream
from inductor_passes.errors import CannotFollowError, PassesError

log = logging.getLogger(__name__)

Record = TypeVar("Record")  # what is told of a run
# Runs the passes on a graph, in place: as a plan says, or freely (None, False), or with launches as they are (None, True).
Run = Callable[[fx.Graph, LaunchPlan | None, bool], Record | None]


class GraphOffer(Generic[Record]):
    """A graph before its passes, and each way to run them that was tried; the graph itself stays as it is."""

    def __init__(self, graph: fx.Graph, stream: Stream, run: Run[Record]) -> None:
        self._graph, self._stream, self._run = graph, stream, run
        self._tried: dict[str, tuple[fx.GraphModule, Record | None]] = {}

    def plan(self) -> str:
        """The plan that this rank would choose alone."""
        trial, record = self._try(None, False)
        text = plan_of(trial.graph).text_for(self._stream)
        self._tried[text] = trial, record
        return text

    def can_follow(self, plan: str) -> bool:
        """Return whether this rank's graph can launch as a plan says."""
        if plan in self._tried or plan == PROGRAM:
            return True
        try:
            trial, record = self._try(LaunchPlan.of(plan), True)
        except (CannotFollowError, ValueError) as error:
            log.info("Graph %s cannot follow a plan: %s", self._stream.graph, error)
            return False
        text = plan_of(trial.graph).text_for(self._stream)
        if text != plan:
            log.info(
                "Graph %s cannot follow plan %s: it would launch %s", self._stream.graph, plan, text
            )
            return False
        self._tried[plan] = trial, record
        return True

    def carry_out(self, plan: str) -> Record | None:
        """Make the graph launch as ``plan`` says, which it can follow."""
        if plan not in self._tried:
            trial, record = self._try(None, True)
            text = plan_of(trial.graph).text_for(self._stream)
            if text != PROGRAM:
                raise PassesError(
                    f"A pass changed the launches of graph {self._stream.graph}, which must stay the program's: "
                    f"{text}.",
                    "Ranks share the program's order alone here.",
                    "Set keeps_launch_order and changes_launches of your pass as its base class says.",
                )
            self._tried[plan] = trial, record
        trial, record = self._tried[plan]
        _put_in_place(self._graph, trial)
        return record

    def _try(self, plan: LaunchPlan | None, keep: bool) -> tuple[fx.GraphModule, Record | None]:
        trial = fx.GraphModule(self._graph.owning_module or {}, copy.deepcopy(self._graph))
        return trial, self._run(trial.graph, plan, keep)


class CachedOffer:
    """A graph whose code came from a cache, and launches as ``cached`` says."""

    def __init__(self, cached: str) -> None:
        self._cached = cached

    def plan(self) -> str:
        """The plan of its code."""
        return self._cached

    def can_follow(self, plan: str) -> bool:
        """Return whether it can launch so. The code is made anew for another plan, and if it cannot, that says so."""
        return True


def _put_in_place(graph: fx.Graph, trial: fx.GraphModule) -> None:
    """Let ``graph`` hold the nodes of a trial, by the names that they have there."""
    owner = graph.owning_module
    for node in trial.graph.nodes if owner is not None else ():
        if node.op == "get_attr" and not hasattr(owner, str(node.target).partition(".")[0]):
            name = str(node.target).partition(".")[0]
            setattr(owner, name, getattr(trial, name))
    for node in reversed(list(graph.nodes)):
        graph.erase_node(node)
    graph._graph_namespace = fx.graph._Namespace()
    copied: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(trial.graph, copied)
    last = trial.graph.output_node()
    copied[last] = graph.output(result)
    copied[last].meta = dict(last.meta)
