"""A pass: one class, one idea, checked before and after it runs."""

from __future__ import annotations

import abc
import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.errors import InvariantError, OptionError
from inductor_passes.graph.edit import computed
from inductor_passes.graph.invariants import check_functional
from inductor_passes.records import ScheduleRecord, SplitRecord
from inductor_passes.torch_compat.nodes import namespace

if TYPE_CHECKING:
    from inductor_passes.pass_options import PassOptions
    from inductor_passes.ranks.collective_trace import LaunchPlan


# Operators whose results ``Rewrite`` computes anew to check them.
_NAMESPACES = ("aten", "prims", "_c10d_functional")


class Numerics(enum.Enum):
    """Changes that a pass may make to the numbers of a program."""

    BITWISE = "bitwise"  # every bit as before
    REASSOCIATING = "reassociating"  # sums in another order
    APPROXIMATE = "approximate"  # asked for by name only


@dataclass(frozen=True, slots=True)
class PassStats:
    """Result of one run of a pass. ``counters`` are non-negative integers, named in the pass's
    docstring.

    ``schedule``: the decision of a pass that orders the whole graph. ``split``: that of the pass
        that cuts graphs into chunks.
    ``notes``: decisions worth a line each.
    """

    changed: bool
    counters: Mapping[str, int] = field(default_factory=dict)
    schedule: ScheduleRecord | None = None
    notes: tuple[str, ...] = ()
    split: SplitRecord | None = None


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Options of the scheduler: what a schedule may cost.

    extra_memory_ratio: how far peak memory may exceed that of the program's own order, as a share
        of it. The larger of this and ``extra_memory_bytes`` counts.
    extra_memory_bytes: the same in bytes. None: what FSDP2's own runtime would add, in graphs that
        gather for its modules; else 1 GiB.
    bucket: whether collectives may be merged.
    """

    extra_memory_ratio: float = 0.05
    extra_memory_bytes: int | None = None
    bucket: bool = True

    def __post_init__(self) -> None:
        for key in ("extra_memory_ratio", "extra_memory_bytes"):
            value = getattr(self, key)
            if key == "extra_memory_bytes" and value is None:
                continue
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or value < 0:
                raise _bad_option(key, value, "a number of at least 0")
        if not isinstance(self.bucket, bool):
            raise _bad_option("bucket", self.bucket, "True or False")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ScheduleOptions:
        """From a user's mapping; what it leaves out keeps its default."""
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise OptionError(
                    f"Option 'schedule' has an unknown key {key!r}.",
                    "",
                    f"Known are {', '.join(known)}.",
                )
        return cls(**given)


def _bad_option(key: str, value: object, wanted: str) -> OptionError:
    return OptionError(f"Option 'schedule' has {key} = {value!r}.", "", f"It takes {wanted}.")


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
    # Marks, in a graph of forward and backward, what the one keeps for the other: runs before they
    # are parted, and on no other graph.
    decides_what_is_kept: ClassVar[bool] = False
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


class Rewrite(GraphPass):
    """Fewer or smaller collectives, same meaning.

    Requires: a functional graph.
    Ensures:  shape and dtype of every new node, and of what reads one, are what its op makes of its
              inputs; launches that stay keep their order; a second run changes nothing.
    """

    changes_launches = True

    def requires(self, graph: fx.Graph) -> None:
        check_functional(graph, self.name)

    def ensures(self, before: Sequence[fx.Node], graph: fx.Graph) -> None:
        known = set(before)
        for node in graph.nodes:
            touched = node not in known or any(n not in known for n in node.all_input_nodes)
            if touched and namespace(node.target) in _NAMESPACES:
                self._check(node)

    def _check(self, node: fx.Node) -> None:
        recorded = node.meta.get("val")
        # A number or a size that the data says has no second name: computed again it would be a new
        # symbol, which no node binds.
        if not isinstance(recorded, torch.Tensor) or node.meta.get("unbacked_bindings"):
            return
        true = computed(node)
        if recorded.dtype != true.dtype or recorded.shape != true.shape:
            raise InvariantError(
                f"The pass {self.name} left %{node.name} with {recorded.dtype} "
                f"{list(recorded.shape)}, "
                f"but its op makes {true.dtype} {list(true.shape)} of its inputs.",
                "",
                f"Leave it out with options={{'disable': ['{self.name}']}}.",
            )
