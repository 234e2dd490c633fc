"""The pipeline as the objects that Inductor calls, and their part of its cache keys."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes import order_pinning, plugins, registry
from inductor_passes.cost import CostModel, default_topology, load_topology
from inductor_passes.cost.model import digest_of
from inductor_passes.errors import GroupError
from inductor_passes.extension import Extension
from inductor_passes.graph.collectives import (
    HOST_KINDS,
    argument,
    group_name,
    input_tensors,
    is_launch,
    kind,
    launches,
)
from inductor_passes.graph.dependencies import launches_show_that_ranks_differ
from inductor_passes.graph.phases import fill_phases, last_phase
from inductor_passes.graph.printing import user_line
from inductor_passes.graph_pass import GraphPass
from inductor_passes.inductor import cache_keys
from inductor_passes.inductor.local_graphs import has_uneven_inputs, is_rank_dependent
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import (
    cost_model,
    pass_context,
    run_pass,
    run_passes,
    selected_passes,
)
from inductor_passes.ranks import carried
from inductor_passes.ranks import decision as orders
from inductor_passes.ranks.collective_trace import (
    PROGRAM,
    CollectiveTrace,
    LaunchPlan,
    frame_of_graph,
    number_launches,
)
from inductor_passes.ranks.decision import (
    Decision,
    Joint,
    Offer,
    Orders,
    half_of,
    record_on_launches,
)
from inductor_passes.ranks.protocol import GraphOffer
from inductor_passes.records import GraphRecord, PassRecord
from inductor_passes.report import recorder, report
from inductor_passes.rewrite.narrow_gathers import narrowed_types
from inductor_passes.rewrite.send_masks import send_masks_as_bytes
from inductor_passes.schedule.schedule_pass import CAP_BYTES
from inductor_passes.torch_compat import aot, c10d, caches, dynamo, inductor

if TYPE_CHECKING:
    from inductor_passes.inductor.session import CompileSession


def check_groups(graph: fx.Graph) -> None:
    """Every launch names a live process group that serves the device of its tensors.

    Raises GroupError. A group that is a graph input is known only when the graph runs: not checked.
    """
    for launch in launches(graph):
        if isinstance(argument(launch, "group_name"), fx.Node) or kind(launch) in HOST_KINDS:
            continue
        name = group_name(launch)
        devices = c10d.group_device_types(name)
        if devices is None:
            raise GroupError(
                f"{kind(launch)} uses the process group {name!r}, which does not "
                f"exist{_at(launch)}.",
                "torch.distributed is not initialised, or the group was destroyed.",
                "Call torch.distributed.init_process_group() before compiling, and keep groups "
                "alive while compiled functions that use them run.",
            )
        for tensor in input_tensors(launch):
            if devices and tensor.device.type not in devices:
                raise GroupError(
                    f"{kind(launch)} sends a {tensor.device.type} tensor over the process group "
                    f"{name!r}, whose backends serve {', '.join(sorted(devices))}{_at(launch)}.",
                    "The device of the mesh or group does not match the tensors.",
                    f"Make the mesh with init_device_mesh({tensor.device.type!r}, ...), or move "
                    f"the tensors to {sorted(devices)[0]}.",
                )


def _at(node: fx.Node) -> str:
    line = user_line(node)
    return f" (from {line})" if line else ""


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attachment:
    """The passes of one compile, as Inductor configuration: on the joint graph, before and after
    upstream's post-grad.
    """

    options: PassOptions
    chain_pre: Any = None
    chain_post: Any = None
    chain_joint: Any = None
    # Upstream's reorder_for_locality, which we run in its stead: whether at all, and in training
    # too.
    locality: bool = True
    locality_in_training: bool = False
    # Some value's shards differ in size.
    uneven: bool = False
    # Where the graph stands in the program, if ranks settle its launches: they are known by that.
    place: str = ""
    # The compile that these are of; None where a user has given them to Inductor.
    session: CompileSession | None = dataclasses.field(default=None, compare=False, repr=False)
    # Only looks, for somebody who explains a program: gives way to passes that are asked for.
    observes: bool = False

    def joint(self, graph: fx.Graph, is_inference: bool) -> None:
        """Run the pass for joint graphs on a training step, as ranks agree.

        It runs before AOTAutograd makes a forward and a backward graph.
        """
        if self.chain_joint is not None:
            inductor.call_pass(self.chain_joint, graph, is_inference)
        if not self.observes:
            keep_before_writes(graph)
        self._cut_if_it_communicates(graph)
        record = None if self.observes else mark_kept(graph, self.options, self.ranks_differ())
        if self.session is not None:
            self.session.kept = record

    def _cut_if_it_communicates(self, graph: fx.Graph) -> None:
        passes = registry.ordered_passes()
        if not any(each.runs_on_joint and each.enabled(self.options) for each in passes):
            return
        communicates = any(is_launch(node) for node in graph.nodes)
        if not communicates or not aot.is_joint(graph) or self.ranks_differ():
            return
        check_groups(graph)
        inductor.sort_by_data(graph)
        self._cut_joint(graph)

    def _cut_joint(self, graph: fx.Graph) -> None:
        """Split a joint graph in place or leave it whole, the same on all ranks.

        The launches of the graph carry the choice. No other rank is asked if no pass would split
        it.
        """
        chosen = selected_passes(
            pass_context(cost_model(graph, self.options), self.options, False), self.options
        )
        cutting = next((each for each in chosen if each.runs_on_joint), None)
        if cutting is None:
            return

        def run(trial: fx.Graph, plan: LaunchPlan | None, keep: bool) -> PassRecord | None:
            if plan is None and keep:
                return None
            pass_ = cutting if plan is None else cutting.following(plan)
            return None if pass_ is None else run_pass(pass_, trial)

        job = orders.current()
        trace = self._trace(graph, "joint", f"{self.compile_id()}:joint")
        if job is None or not trace.launches:
            record = run(graph, None, False)
            assert record is not None
            joint = Joint("cut" if record.changed else PROGRAM, None, record)
        else:
            offer = GraphOffer(graph, trace, run)
            decision = self._decide(job, trace, offer)
            log.info("Graph %s: parts %s", trace.graph, decision.how)
            made = None if decision.plan == PROGRAM else offer.carry_out(decision.plan)
            joint = Joint(decision.plan, trace, made)
        graph.output_node().meta.pop(CAP_BYTES, None)  # is of both halves together
        record_on_launches(graph, joint)

    def _trace(self, graph: fx.Graph, phase: str, graph_id: str) -> CollectiveTrace:
        return number_launches(
            graph,
            orders.ranks_of,
            frame_of_graph(),
            phase=phase,
            graph_id=graph_id,
            options=f"{self.options.digest()} {narrowed_types(graph)}".strip(),
        )

    def _decide(self, job: Orders, trace: CollectiveTrace, offer: Offer) -> Decision:
        """Agree on a plan. Ranks that wait for the compile in work hear of it too."""
        return job.decide(trace, self.session.offer(trace, offer) if self.session else offer)

    def before(self, graph: fx.Graph, is_inference: bool) -> None:
        """Upstream's ``reorder_for_locality``, except on graphs whose launches it would bring to
        their waits; sums as upstream's patterns take them; masks as bytes.
        """
        # A whole step is compiled as inference is, and is training: the pass would bring updates
        # to the end, so that all gradients lived until then.
        trains = not is_inference or last_phase(graph) > 0
        wanted = self.locality and (self.locality_in_training or not trains)
        if wanted and not any(is_launch(node) for node in graph.nodes):
            inductor.reorder_for_locality(graph)
        if self.chain_pre is not None:
            inductor.call_pass(self.chain_pre, graph, is_inference)
        if not self.observes:
            inductor.write_alpha_as_product(graph)
            send_masks_as_bytes(graph)

    def after(self, graph: fx.Graph, is_inference: bool) -> None:
        """Run the passes, pin what they decided, and record it."""
        if self.chain_post is not None:
            inductor.call_pass(self.chain_post, graph, is_inference)
        name = dynamo.graph_being_compiled()
        phase = "inference" if is_inference else "backward" if "backward" in name else "forward"
        self.improve(graph, phase)

    def improve(self, graph: fx.Graph, phase: str, *, lowers: bool = True) -> None:
        """Run the passes on a graph and record it; unless ``lowers``, Inductor is not what comes
        next.
        """
        check_groups(graph)
        dynamo.trace_artifact(f"inductor_passes_{phase}_graph_before", lambda: str(graph))
        looks_up = lowers and any(is_launch(node) for node in graph.nodes)
        graph_id = f"{self.compile_id()}:{phase}"
        looked_up = cache_keys.why_missed(graph, self.key(), graph_id) if looks_up else None
        cost = cost_model(graph, self.options)
        record = self._run(graph, phase, graph_id, cost)
        if record is None:
            return
        record = dataclasses.replace(record, cache=looked_up)
        for choice in () if self.session is None else self.session.choices.values():
            carried.count_choice(choice)
        kept = None if self.session is None else self.session.kept
        if kept is not None and phase != "backward":
            record = dataclasses.replace(record, passes=(kept, *record.passes))
        fill_phases(graph)
        if lowers:
            self._pin(graph, cost)
        pending = None if self.session is None else self.session.pending
        if recorder.compiled(record, pending):
            report.write(self.options.report)
        log.info(
            "%s graph %s: %d collectives, exposed %.0f -> %.0f us, simulated on %s",
            record.phase,
            record.graph_id,
            len(record.collectives),
            record.before.exposed_us,
            record.after.exposed_us,
            record.topology,
        )
        dynamo.trace_artifact(f"inductor_passes_{phase}_graph_after", lambda: str(graph))

    def _pin(self, graph: fx.Graph, cost: CostModel) -> None:
        """Tie what the passes decided, so that Inductor keeps it."""
        decided = self.options.schedule != "off" and order_pinning.NAME not in self.options.disable
        # Sends and receives hang in another order than the program's, whoever schedules.
        if not decided and not launches_show_that_ranks_differ(graph):
            return
        if inductor.can_pin_order():
            order_pinning.pin_order(graph, cost)
        else:
            log.warning("This torch has no control_dependencies: Inductor may move launches back.")

    def _run(
        self, graph: fx.Graph, phase: str, graph_id: str, cost: CostModel
    ) -> GraphRecord | None:
        """Run the passes by the order that this rank's job has agreed on, or agrees on now."""

        def run(graph: fx.Graph, plan: LaunchPlan | None, keep: bool) -> GraphRecord | None:
            return run_passes(
                graph,
                self.options,
                phase=phase,
                graph_id=graph_id,
                ranks_differ=keep or is_rank_dependent(),
                ragged=self.is_ragged(),
                follow=plan,
                cost=cost,
            )

        joint = half_of(graph)
        job = orders.current()
        if job is None or self.looks_only():
            # Ragged shards make graphs that differ in ways no rule here foresees, and nobody is
            # asked.
            return _told(run(graph, None, self.is_ragged()), joint)
        trace = self._trace(graph, phase, graph_id)
        if not trace.launches:
            return _told(run(graph, None, False), joint)
        if joint is not None and joint.trace is not None:
            trace = dataclasses.replace(trace, joint=joint.key)
            carried.count(joint.trace, joint.plan)
        offer = GraphOffer(graph, trace, run)
        decision = self._decide(job, trace, offer)
        log.info("Graph %s: order of launches %s", graph_id, decision.how)
        carried.count(trace, decision.plan)
        return _told(offer.carry_out(decision.plan), joint)

    def compile_id(self) -> str:
        """Return the id of the compile in work."""
        return recorder.compile_id() if self.session is None else self.session.graph_id

    def looks_only(self) -> bool:
        """Return whether no pass of these options can change what a graph launches."""
        return self.options.passes == () and self.options.schedule == "off"

    def ranks_differ(self) -> bool:
        """Return whether other ranks may hold another graph than the one in work."""
        return self.is_ragged() or is_rank_dependent()

    def is_ragged(self) -> bool:
        """Return whether shards of some value differ in size."""
        return self.uneven or has_uneven_inputs()

    def uuid(self, side: str) -> str | None:
        """Return the text that Inductor's caches take for these passes; None, if a chained pass
        has none.
        """
        parts = self.key()
        if None in parts.values():
            return None
        return hashlib.sha256(repr([side, parts]).encode()).hexdigest()

    def key(self) -> dict[str, str | None]:
        """Return all that these passes add to a graph's key, each part under a name that people
        understand.
        """
        parts: dict[str, str | None] = {
            "torch": caches.torch_version(),
            "inductor_passes": plugins.digest_of_sources(__name__),
            "reorder_for_locality": f"{self.locality} {self.locality_in_training}",
            "whether ranks differ": str(self.ranks_differ()),
            "place in the program": self.place,
        }
        for extension in registry.extensions():
            if digest := _extension_digest(extension):
                parts[extension.name] = digest
        parts |= {f"option {name}": value for name, value in self.options.parts().items()}
        if (job := orders.current()) is not None:
            salt = "" if self.session is None else self.session.cache_salt
            parts["orders that ranks agreed on"] = f"{job.digest()} {salt}"
        topologies = (
            (default_topology("cpu"), default_topology("cuda"))
            if self.options.topology is None
            else (self.options.topology,)
        )
        # A digest holds the shapes of all groups too: another mesh is another schedule.
        figures = [digest_of(load_topology(name)) for name in topologies]
        parts["figures of the topology, ranks and groups"] = repr(figures)
        for pass_ in registry.ordered_passes():
            parts[f"pass {pass_.name}"] = third_party_digest(pass_)
        for key, chained in (
            ("post_grad_custom_pre_pass", self.chain_pre),
            ("post_grad_custom_post_pass", self.chain_post),
            ("joint_custom_post_pass", self.chain_joint),
        ):
            if chained is not None:
                theirs = getattr(chained, "uuid", lambda: None)()
                parts[key] = None if theirs is None else repr(theirs)
        return parts


def _told(record: GraphRecord | None, joint: Joint | None) -> GraphRecord | None:
    """The record of a forward graph, with how the joint graph was cut that it is a half of."""
    if record is None or joint is None or joint.record is None or not joint.is_cut:
        return record
    if record.phase == "backward":
        return record
    return dataclasses.replace(record, passes=(joint.record, *record.passes))


def third_party_digest(pass_: registry.Registered) -> str:
    """Name, sources and configuration of a registered pass; this package's sources are in each key
    already.
    """
    if registry.is_built_in(pass_):
        return pass_.name
    cls = pass_ if isinstance(pass_, type) else type(pass_)
    config = pass_.digest() if isinstance(pass_, GraphPass) else ""
    return f"{pass_.name} {config} {plugins.digest_of_sources(cls.__module__)}"


def _extension_digest(extension: Extension) -> str:
    """What an extension adds to a key; of somebody else's its sources too."""
    if registry.is_built_in(extension):
        return extension.cache_key()
    return f"{extension.cache_key()} {plugins.digest_of_sources(type(extension).__module__)}"


def mark_kept(graph: fx.Graph, options: PassOptions, ranks_differ: bool) -> PassRecord | None:
    """Let a pass mark what the forward in a graph keeps for the backward in it; return its record.

    None where none is on. It runs before the two are parted.
    """
    registered = registry.ordered_passes()
    if not any(each.decides_what_is_kept and each.enabled(options) for each in registered):
        return None
    context = pass_context(cost_model(graph, options), options, ranks_differ)
    chosen = (each for each in selected_passes(context, options) if each.decides_what_is_kept)
    return next((run_pass(each, graph) for each in chosen), None)


def keep_before_writes(graph: fx.Graph) -> None:
    """Copy inputs that forward reads and then writes, where backward may need what was read.

    Torch's partition takes an input for a value that backward can have at no cost, and computes
    from it again what forward computed. By then the write at the end of forward has changed it:
    gradients are silently wrong (seen in 2.13, a buffer that a training forward reads and updates).
    """
    writes = [
        node
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if node.args[0].op == "placeholder"
    ]
    if not writes or not aot.is_joint(graph):
        return
    of_backward = _behind(aot.tangents(graph))
    for write in writes:
        source = write.args[0]
        if not of_backward & _behind([source]):
            continue
        with graph.inserting_after(source), source.meta["val"].fake_mode:
            copied = graph.call_function(torch.ops.aten.clone.default, (source,))
            copied.meta["val"] = source.meta["val"].clone()
        # The partition keeps it: a copy that backward makes would be one of the changed input.
        copied.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        for user in [each for each in source.users if each not in (copied, *writes)]:
            user.replace_input_with(source, copied)


def _behind(nodes: list[fx.Node]) -> set[fx.Node]:
    """These nodes and all that are computed from them; a write to an input is the end."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found and node.target is not torch.ops.aten.copy_.default:
            found.add(node)
            waiting.extend(node.users)
    return {node for node in found if node.op != "output"}


@functools.cache
def _pass_class() -> type:
    class Side(inductor.pass_base()):  # type: ignore[misc]
        """One side of an attachment as the object that Inductor wants."""

        def __init__(self, side: str, attachment: Attachment) -> None:
            self.side, self.attachment = side, attachment

        def __call__(self, graph: fx.Graph, is_inference: bool | None = None) -> None:
            getattr(self.attachment, self.side)(graph, inductor.is_inference(is_inference))

        def uuid(self) -> str | None:
            return self.attachment.uuid(self.side)

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other) and vars(self) == vars(other)

        def __hash__(self) -> int:
            return hash((self.side, self.attachment.options))

    return Side


def attach_to_joint(attachment: Attachment) -> Any:
    """The object for ``joint_custom_post_pass``."""
    return _pass_class()("joint", attachment)


def attach(attachment: Attachment) -> tuple[Any, Any]:
    """The objects for ``post_grad_custom_pre_pass`` and ``post_grad_custom_post_pass``."""
    for extension in registry.extensions():
        extension.before_compile()
    side = _pass_class()
    return side("before", attachment), side("after", attachment)
