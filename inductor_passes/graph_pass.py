"""A pass: one class, one idea, checked before and after it runs."""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.records import ScheduleRecord, SplitRecord
from inductor_passes.schedule_options import ScheduleOptions

if TYPE_CHECKING:
    from inductor_passes.pass_options import PassOptions
    from inductor_passes.ranks.collective_trace import LaunchPlan


class Numerics(enum.Enum):
    """Changes that a pass may make to the numbers of a program."""

    BITWISE = "bitwise"  # every bit as before
    REASSOCIATING = "reassociating"  # sums in another order
    APPROXIMATE = "approximate"  # asked for by name only


@dataclass(frozen=True, slots=True)
class PassStats:
    """Result of one run of a pass. ``counters`` are non-negative integers, named in the pass's
    docstring.

    ``schedule``: the decision of a pass that settles the order of the whole graph. ``split``: that
        of the pass that cuts graphs into parts.
    ``notes``: decisions worth a line each.
    """

    changed: bool
    counters: Mapping[str, int] = field(default_factory=dict)
    schedule: ScheduleRecord | None = None
    notes: tuple[str, ...] = ()
    split: SplitRecord | None = None


@dataclass(frozen=True, slots=True)
class PassContext:
    """Inputs that a pass may be built from.

    ``cost``: the model of the compile's topology. ``schedule``: the global scheduler's options.
    ``exact``: every bit must stay. ``ranks_differ``: other ranks may hold another graph. ``extra``:
    options of extensions, where they are not their default.
    """

    cost: CostModel
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    exact: bool = False
    ranks_differ: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


class GraphPass(abc.ABC):
    """A rewrite of one post-grad ``fx.Graph``, in place.

    Pure: the result depends on the graph, the pass's own configuration and the cost model that it
    was built with; never on rank, clock or hash order, because ranks that decide differently hang.
    """

    name: ClassVar[str]
    numerics: Numerics = Numerics.BITWISE
    # A pass that sets the order of launches and waits. While one is on, upstream's schedulers are
    # off.
    schedules: ClassVar[bool] = False
    # Promise checked after every run: the launches of a group keep their order.
    keeps_launch_order: ClassVar[bool] = True
    # Makes launches fewer, smaller or others: not run where other ranks may hold another graph,
    # because what is found in one need not be in the other.
    changes_launches: ClassVar[bool] = False
    # All that it changes of a launch stands in the plan that ranks agree on
    # (``ranks/collective_trace.py``): runs where shards are ragged too, because a rank whose graph
    # cannot do the same says so.
    shows_in_plan: ClassVar[bool] = False
    # A plan of another rank says what it would do: left out where the rank follows one.
    replaced_by_plan: ClassVar[bool] = False
    # Runs on launches whose sizes differ between ranks, if only by counts that the program
    # exchanges: where it acts depends on no rank's numbers.
    allows_uneven_counts: ClassVar[bool] = False
    # Acts on what the scheduler leaves exposed: runs after it.
    reads_schedule: ClassVar[bool] = False
    # Runs on the joint graph of a training step too, before AOTAutograd partitions it.
    runs_on_joint: ClassVar[bool] = False
    # Skipped on graphs without a collective, so that those compile to upstream's code.
    needs_collectives: ClassVar[bool] = True

    @classmethod
    def build(cls, context: PassContext) -> GraphPass:
        """Make the pass for one compile. The default takes no arguments."""
        return cls()

    @classmethod
    def enabled(cls, options: PassOptions) -> bool:
        """Return whether these options leave the pass on. ``passes`` and ``disable`` are looked
        at elsewhere.
        """
        return not (cls.schedules and options.schedule == "off")

    @classmethod
    def following(cls, plan: LaunchPlan) -> GraphPass | None:
        """Return the pass that does what a plan of another rank says this one did there, or None
        for nothing.
        """
        return None

    def requires(self, graph: fx.Graph) -> None:
        """Raise PreconditionError if this graph cannot be rewritten."""

    @abc.abstractmethod
    def run(self, graph: fx.Graph) -> PassStats:
        """Rewrite ``graph`` in place and say what changed."""

    def ensures(self, before: Sequence[fx.Node], graph: fx.Graph) -> None:
        """Raise InvariantError if a promise of this pass is broken.

        ``before`` holds the nodes in the order they had when ``run`` was called; erased nodes
        included.
        """

    def digest(self) -> str:
        """Everything besides the source that changes what ``run`` does; part of the cache key."""
        return repr(self)

    def __repr__(self) -> str:
        return f"{type(self).__module__}.{type(self).__qualname__}()"
