"""The pass that cuts a graph, or finds that it gains nothing."""

from __future__ import annotations

import time

from torch import fx

from inductor_passes.base import PassContext, PassStats
from inductor_passes.cost import CostModel
from inductor_passes.errors import PreconditionError
from inductor_passes.schedule.schedule_pass import CAP_BYTES, ScheduleGraph
from inductor_passes.schedule_options import ScheduleOptions
from inductor_passes.split.base import Cutting
from inductor_passes.split.choose import LEAST_GAIN, Choice, choose
from inductor_passes.split.joint import half_of
from inductor_passes.split.told import notes_of, record_of

AUTO = (2, 4)


class SplitRegions(Cutting):
    """Cut regions into parts that run one after another: one computes while another's collective is on its way.

    What is behind an input of the graph is computed in parts as far as rules carry (``rules``), the collectives on
    the way too; where they end, parts are joined, and another region may begin, in as many parts as are best there.
    Regions and numbers of parts are those of the shortest predicted step, scheduled, one region after the other; with
    ``auto`` the graph is left whole unless that saves 3 % or more.

    Requires: a functional graph of known sizes.
    Ensures:  the same values, sums over parts in another order; each cut launch has a launch for every part, of the
              same kind and group, which sends an equal share; what is not cut reads what it read.
    Stats:    ``launches`` (that were cut), ``parts`` (of each, in the first region), ``nodes`` (that were cut), ``joins``.
    """

    name = "split_regions"

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
        return cls(context.cost, context.split, context.schedule)

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
                return f"compute waits {waits:.1%} of the step for launches that can be cut, less than {LEAST_GAIN:.0%}"
            return f"no input leads to a launch in {parts} equal parts"
        if not asked and choice.gain < LEAST_GAIN:
            return f"{choice.gain:.1%} to gain, less than {LEAST_GAIN:.0%}"
        return ""
