"""Split a graph into chunks where that pays, or as a plan of another rank says: the passes, and the
option ``split``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

from inductor_passes import registry
from inductor_passes.cost import CostModel
from inductor_passes.errors import (
    CannotFollowError,
    InvariantError,
    OptionError,
    PreconditionError,
)
from inductor_passes.extension import Extension, Option
from inductor_passes.graph.collectives import (
    MEMBERS,
    group_name,
    input_tensors,
    kind,
    payload_bytes,
    reduce_op,
)
from inductor_passes.graph.dependencies import differs_by_numbers, launches_show_that_ranks_differ
from inductor_passes.graph.edit import Values
from inductor_passes.graph_pass import (
    GraphPass,
    Numerics,
    PassContext,
    PassStats,
    Rewrite,
    ScheduleOptions,
)
from inductor_passes.ranks.collective_trace import LaunchPlan
from inductor_passes.ranks.decision import half_of
from inductor_passes.schedule.schedule_pass import CAP_BYTES, ScheduleGraph
from inductor_passes.split.candidates import from_inputs, from_inside
from inductor_passes.split.choose import LEAST_GAIN, Choice, choose
from inductor_passes.split.cut import Cutter, cut_all
from inductor_passes.split.decision import notes_of, record_of
from inductor_passes.split.price import backward_of
from inductor_passes.split.region import Positions, Region, spread
from inductor_passes.split.rules.rows import Addends, Routed
from inductor_passes.split.rules.rule import Cut, has_equal, shape_of, unequal_parts

if TYPE_CHECKING:
    from inductor_passes.pass_options import PassOptions


class Cutting(Rewrite):
    """A pass that writes regions into a graph, with what is promised of that."""

    numerics = Numerics.REASSOCIATING

    def __init__(self) -> None:
        self._cut: list[
            tuple[fx.Node, object, float | None, float | None, tuple[fx.Node, ...]]
        ] = []
        self._returned: list[object] = []
        self._values: Values | None = None  # of the graph that is cut

    def requires(self, graph: fx.Graph) -> None:
        super().requires(graph)
        self._values = Values()
        if self._may_differ(graph):
            raise PreconditionError(
                f"{self.name} needs a graph whose sizes are known and whose launches are alike on "
                "all ranks.",
                "Where to cut depends on sizes, and other ranks may see others.",
                "Compile with static sizes (dynamic=False), or leave the option 'split' out.",
            )

    def _may_differ(self, graph: fx.Graph) -> bool:
        """Whether other ranks may hold another graph, or other numbers in this one."""
        return differs_by_numbers(graph)

    def cut(self, graph: fx.Graph, region: Region) -> Cutter:
        """Write a region into the graph."""
        before = [
            (launch, _what(launch), *_shares(region, launch, payload_bytes(launch)))
            for launch in region.launches
        ]
        self._returned = _returned(graph)
        cutter = Cutter(graph, region, self._values)
        cutter.run()
        self._cut = [(*entry, cutter.made[entry[0]]) for entry in before]
        return cutter

    def cut_too(self, graph: fx.Graph, region: Region) -> Cutter:
        """Write one region more; what was promised of those before is checked as well."""
        before, returned = self._cut, self._returned
        cutter = self.cut(graph, region)
        self._cut, self._returned = [*before, *self._cut], returned or self._returned
        return cutter

    def cut_each(self, graph: fx.Graph, regions: Sequence[Region]) -> list[Cutter]:
        """Write several regions that share no node."""
        return cut_all(graph, regions, lambda region: self.cut_too(graph, region))

    def ensures(self, before: Sequence[fx.Node], graph: fx.Graph) -> None:
        """Check shares of launches, what the graph returns, and what stayed and reads a new
        node.
        """
        for launch, what, share, whole, parts in self._cut:
            if len({str(part.args[0]) for part in parts}) < len(parts):
                raise self._broken(f"two parts of %{launch.name} send the same")
            for part in parts:
                sent = None if share is None else payload_bytes(part)
                if (_what(part), sent) != (what, share):
                    raise self._broken(
                        f"%{part.name} launches {_what(part)} of {payload_bytes(part)} bytes, and "
                        "is to be one of "
                        f"{len(parts)} parts of %{launch.name}: {what} of {share} bytes each"
                    )
            if whole is not None and sum(map(payload_bytes, parts)) != whole:
                raise self._broken(f"parts of %{launch.name} are not {whole} bytes together")
        if self._cut and _returned(graph) != self._returned:
            raise self._broken("the graph returns other shapes than it did")
        self._values = None
        stayed = set(before)
        for node in graph.nodes:
            reads_new = node in stayed and any(n not in stayed for n in node.all_input_nodes)
            if reads_new and isinstance(node.target, torch._ops.OpOverload):
                self._check(node)

    def _broken(self, what: str) -> InvariantError:
        fix = f"Leave it out with options={{'disable': ['{self.name}']}}."
        return InvariantError(f"The pass {self.name} cut the graph wrongly: {what}.", "", fix)


def _shares(region: Region, launch: fx.Node, size: int) -> tuple[float | None, float | None]:
    """Return how many bytes each part of a launch sends, and all: of counts all and more, of
    tokens those that are routed (None).
    """
    reads = region.steps[launch].reads
    if any(isinstance(layout, Routed) for layout in reads.values()):
        return None, None
    if any(isinstance(layout, Addends) for layout in reads.values()):
        return size, None
    equal = all(
        isinstance(cut, Cut) and has_equal(cut, shape_of(source), region.parts)
        for source, cut in reads.items()
    )
    return size / region.parts if equal else None, size


def _what(launch: fx.Node) -> tuple[object, ...]:
    dtypes = tuple(tensor.dtype for tensor in input_tensors(launch))
    return kind(launch), group_name(launch), reduce_op(launch), dtypes


def _returned(graph: fx.Graph) -> list[object]:
    values = [node.meta.get("val") for node in graph.output_node().all_input_nodes]
    return [(v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for v in values]


AUTO = (2, 4)
OPTION, WHOLE = "split", "off"  # the option's name, and its value that leaves graphs whole


class SplitRegions(Cutting):
    """Cut regions into chunks: one computes while the collective of another is on the link.

    Nodes downstream of a graph input are computed in chunks as far as rules carry (``rules``),
    together with the collectives among them. Where the rules end, chunks are joined. Another region
    may begin there, with its own best number of chunks. Regions and numbers of chunks are chosen
    one region after the other, by the shortest predicted step of the schedule. With ``auto`` the
    graph is left whole unless that saves 3 % or more.

    Requires: a functional graph of known sizes.
    Ensures:  the same values, sums over parts in another order; each cut launch has a launch for
              every part, of the same kind and group, which sends an equal share; what is not cut
              reads what it read.
    Stats:    ``launches`` (that were cut), ``parts`` (of each, in the first region), ``nodes``
              (that were cut), ``joins``.
    """

    name = "split_regions"
    replaced_by_plan = True
    allows_uneven_counts = True
    runs_on_joint = True

    def __init__(
        self,
        cost: CostModel,
        split: int | str = "auto",
        schedule: ScheduleOptions = ScheduleOptions(),
    ) -> None:
        super().__init__()
        self.cost, self.split, self.schedule = cost, split, schedule

    @classmethod
    def build(cls, context: PassContext) -> SplitRegions:
        return cls(context.cost, context.extra.get(OPTION, WHOLE), context.schedule)

    @classmethod
    def enabled(cls, options: PassOptions) -> bool:
        return bool(options.extra.get(OPTION, WHOLE) != WHOLE)

    @classmethod
    def following(cls, plan: LaunchPlan) -> GraphPass | None:

        return FollowSplit(plan) if plan.parts else None

    def digest(self) -> str:
        return f"{self.split} {self.schedule} {self.cost.digest()}"

    def requires(self, graph: fx.Graph) -> None:
        super().requires(graph)
        joint = half_of(graph)
        if joint is not None and joint.is_cut:
            raise PreconditionError(
                "the joint graph was cut before it was made forward and backward"
            )

    def run(self, graph: fx.Graph) -> PassStats:
        start = time.perf_counter()
        asked = self.split if isinstance(self.split, int) else None
        choice = choose(
            graph,
            ScheduleGraph(self.cost, self.schedule),
            AUTO if asked is None else (asked,),
            least_gain=LEAST_GAIN if asked is None else 0.0,
            values=self._values,
        )
        whole = self._why_whole(choice)
        made = [] if whole else self.cut_each(graph, choice.regions)
        if made:
            graph.output_node().meta[CAP_BYTES] = choice.cap_bytes
        record = record_of(choice, made, whole, time.perf_counter() - start)
        names = ("launches", "parts", "nodes", "joins") if made else ()
        counters = {name: int(getattr(record, name)) for name in names}
        return PassStats(bool(made), counters, notes=notes_of(record), split=record)

    def _why_whole(self, choice: Choice) -> str:
        asked = isinstance(self.split, int)
        if choice.best is None:
            if choice.uncut_us * (1 - LEAST_GAIN) < choice.limit_us and not choice.tried:
                return "the order alone is as short as the limit allows"
            parts = self.split if asked else " or ".join(map(str, AUTO))
            if choice.tried:
                return f"{parts} parts do not fit in memory"
            if choice.exposed_us:
                waits = choice.exposed_us / choice.uncut_us
                return (
                    f"compute waits {waits:.1%} of the step for launches that can be cut, less "
                    f"than {LEAST_GAIN:.0%}"
                )
            return f"no input leads to a launch in {parts} equal parts"
        if not asked and choice.gain < LEAST_GAIN:
            return f"{choice.gain:.1%} to gain, less than {LEAST_GAIN:.0%}"
        return ""


class FollowSplit(Cutting):
    """Cut the launches that a plan cuts, in as many parts, which lie alike.

    The rank that made the plan may have other rows, so parts may be unequal here, and sizes symbols
    (``rules/rule.py``).

    Requires: launches that bear the numbers of the program's (``ranks/collective_trace.py``), and
              what ``SplitRegions`` requires.
    Ensures:  what ``SplitRegions`` ensures.
    Stats:    ``launches`` (that were cut).
    Raises CannotFollowError if no regions of the graph have just these launches in such parts.
    """

    name = "follow_split"

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__()
        self.plan = plan

    def digest(self) -> str:
        return self.plan.text

    def requires(self, graph: fx.Graph) -> None:
        try:
            super().requires(graph)
        except PreconditionError as error:
            raise CannotFollowError(str(error)) from error

    def _may_differ(self, graph: fx.Graph) -> bool:
        return launches_show_that_ranks_differ(graph)

    def run(self, graph: fx.Graph) -> PassStats:
        with unequal_parts():
            return self._follow(graph)

    def _follow(self, graph: fx.Graph) -> PassStats:
        wanted = self.plan.parts
        found = _regions(graph, wanted, lean=False) or _regions(graph, wanted, lean=True)
        if found is None:
            raise CannotFollowError(
                f"The graph has no regions with the parts of the plan: {wanted}."
            )
        made = self.cut_each(graph, found)
        return PassStats(True, {"launches": sum(len(cutter.made) for cutter in made)})


def _regions(
    graph: fx.Graph, wanted: Mapping[int, tuple[int, str]], *, lean: bool
) -> list[Region] | None:
    """Regions with just these launches in such parts: those that have most of them, one after the
    other.

    ``lean``: no more of each than its launches need, so that it takes nothing that another needs.
    """
    found: list[Region] = []
    left = dict(wanted)
    while left:
        best: Region | None = None
        for region in _offered(graph, left, found):
            if best is None or len(region.launches) > len(best.launches):
                best = region
            if len(best.launches) == len(left):
                break
        if best is None:
            return None
        found.append(best.lean() if lean else best)
        for launch in best.launches:
            del left[launch.meta[MEMBERS][0]]
    return found


def _offered(
    graph: fx.Graph, wanted: Mapping[int, tuple[int, str]], there: Sequence[Region]
) -> Iterator[Region]:
    """Regions beside those that are ``there``, which hold some of the launches in such parts,
    and no other launch in parts.
    """
    taken = {node for region in there for node in region.steps}
    positions, late = Positions(graph), backward_of(graph)
    early = frozenset(node for node in graph.nodes if node not in late)
    for parts in sorted({parts for parts, _ in wanted.values()}):
        front = list(from_inputs(graph, parts))
        inside = from_inside(graph, parts, [*front, *there], taken)
        for region in (*front, *inside):
            if taken:
                region = spread(positions, region.seed, region.cut, parts, without=taken)
            fitting = [
                n for n, along in region.launches.items() if _is_wanted(n, parts, along, wanted)
            ]
            if not fitting:
                continue
            its = spread(positions, region.seed, region.cut, parts, fitting, without=taken)
            # A half of a joint graph that has none of them is left whole.
            for half in (late, early):
                if half and its.launches.keys() <= half:
                    its = spread(positions, region.seed, region.cut, parts, fitting).only(
                        {node for node in half if node not in taken}
                    )
            fit = (_is_wanted(n, parts, along, wanted) for n, along in its.launches.items())
            if its.launches and all(fit):
                yield its


def _is_wanted(
    launch: fx.Node, parts: int, along: str, wanted: Mapping[int, tuple[int, str]]
) -> bool:
    return wanted.get(launch.meta.get(MEMBERS, (-1,))[0]) == (parts, along)


def checked(value: Any, options: PassOptions) -> int | str:
    """Return a value of the option. Raises OptionError."""
    number = isinstance(value, int) and not isinstance(value, bool)
    if not (value >= 2 if number else value in (WHOLE, "auto")):
        raise OptionError(
            f"Option 'split' is {value!r}.",
            "A graph is cut into 2 parts or more; fewer leave it whole.",
            "It takes 'off', 'auto' or a whole number from 2 on.",
        )
    if value != WHOLE and not isinstance(options.schedule, ScheduleOptions):
        raise OptionError(
            f"Option 'split' is {value!r}, and 'schedule' is {options.schedule!r}.",
            "Parts gain by the order that the scheduler gives them, and by nothing else.",
            "Leave 'schedule' out, or set 'split' to 'off'.",
        )
    found: int | str = value
    return found


class Splitting(Extension):
    """The option that says whether, and into how many parts, graphs are cut."""

    name = "splitting"
    options: ClassVar[Mapping[str, Option]] = {
        OPTION: Option(
            "``off``; a number of parts, 2 or more, that regions of a graph are cut into, so that "
            "one part computes while another's collective is on its way; or ``auto``, as many as "
            "are predicted to pay, if any.",
            WHOLE,
            checked,
        )
    }


def register() -> None:
    """Add the pass and its option."""
    registry.register(SplitRegions, before=ScheduleGraph.name)
    registry.register_extension(Splitting())
