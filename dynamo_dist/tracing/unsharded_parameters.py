"""Parameters that are read unsharded while a wrapper's forward is traced, and stay sharded
everywhere else.

The module itself does not change: only the answer that Dynamo gets for ``module.weight`` does,
between the wrapper's hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import dynamo_building, dynamo_calls, dynamo_modules
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import eager_fallback
from dynamo_dist.tracing.fsdp2_gather import Gather

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase

Place = tuple[int, str]  # id of the module that a parameter is registered in, and its name there


@dataclass(frozen=True)
class Read:
    """How one parameter is read: the registered one, tracked by ``build(tx)``, through ``gather``;
    or as ``whole``, a tracker.

    ``key`` is the same for all places of one parameter. ``kept``: it stays whole after forward.
    ``leaf(tx)`` tracks what takes the gradient if that is not reduced.
    """

    key: tuple[int, object]  # the id of the wrapper, and which parameter of it
    gather: Gather | None = None
    build: Callable[[object], object] | None = None
    kept: bool = False
    whole: object = None
    leaf: Callable[[object], object] | None = None


@dataclass
class Reads:
    """What one trace knows: the parameters that are whole now, and those gathered in each graph of
    it.

    ``tables``: ``_parameters`` that a program has asked for and may change, by id of the module and
        graph.
    ``read``: keys of those that were read. ``inside``: wrappers whose forward is being traced,
        outermost first; ``entered``: all that were, ``outermost``: those of them that no other
        wrapper holds, and ``quiet``: ids of those that launch nothing. ``entered_in``: by id of a
        wrapper, the graph in which its forward began last. ``run``: of a wrapper for
        several modules, by id, those that have run since. ``resharded``: what was gathered before a
        backward in the graph. ``keeping``: by key, the leaf that takes a gradient that is not
        reduced.
    """

    whole: dict[Place, Read] = field(default_factory=dict)
    gathered: dict[tuple[object, Any], Any] = field(default_factory=dict)
    tables: dict[tuple[int, Any], Any] = field(default_factory=dict)
    read: set[object] = field(default_factory=set)
    inside: list[object] = field(default_factory=list)
    entered: list[object] = field(default_factory=list)
    entered_in: dict[int, Any] = field(default_factory=dict)
    outermost: list[object] = field(default_factory=list)
    quiet: set[int] = field(default_factory=set)
    run: dict[int, set[int]] = field(default_factory=dict)
    resharded: list[object] = field(default_factory=list)
    keeping: dict[object, Any] = field(default_factory=dict)


def reads(tx: Any) -> Reads:
    """What the trace that ``tx`` belongs to knows."""
    found: Reads = dynamo_calls.trace_state(tx, Reads, "_dynamo_dist_reads")
    return found


def _reads_if_any(tx: Any) -> Reads | None:
    """The same; None where nothing has been read yet."""
    return vars(tx.output).get("_dynamo_dist_reads")


def is_in_forward(tx: Any) -> bool:
    """Return whether a wrapper's forward is being traced."""
    known = _reads_if_any(tx)
    return known is not None and bool(known.inside)


def enter(
    tx: InstructionTranslatorBase,
    wrapper: object,
    table: Iterable[tuple[Place, Read]],
    ranks: Sequence[int],
) -> None:
    """Read these parameters whole from here on; ``ranks`` launch with this one for it."""
    state = reads(tx)
    if wrapper in state.inside:
        return
    new = dict(table)
    if not state.inside:
        _begun.add(wrapper)
        # A wrapper without ranks launches nothing, as DDP in evaluation: there is nothing to agree
        # on.
        if ranks and wrapper not in state.outermost:
            state.outermost.append(wrapper)
    if not ranks:
        state.quiet.add(id(wrapper))
    state.inside.append(wrapper)
    state.entered.append(wrapper)
    state.entered_in[id(wrapper)] = dynamo_calls.current_tracer(tx)
    state.whole.update(new)


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class HookVersions:
    """The hooks of modules inside a wrapper: a program may add some after the first step, which
    upstream does not guard.
    """

    def __init__(self, inside: Iterable[nn.Module]) -> None:
        self._tables = [getattr(module, name) for module in inside for name in HOOKS]
        self._seen: dict[tuple[tuple[int, ...], ...], int] = {}

    def version(self) -> int:
        """Return a number that is the same for the same hooks; the first that were seen have 0,
        in every process.
        """
        # Handles have numbers, of which torch never gives one twice.
        # A list comprehension, which is faster than a generator: this runs before each call.
        found = tuple([tuple(table) for table in self._tables if table])
        # The number goes into a guard; handles' own numbers would differ from process to process.
        return self._seen.setdefault(found, len(self._seen))


def leave(
    tx: InstructionTranslatorBase, wrapper: object, table: Iterable[tuple[Place, Read]]
) -> None:
    """Read them sharded again, those that are not kept."""
    state = reads(tx)
    state.inside.remove(wrapper)
    _begun.discard(wrapper)
    for place, read in table:
        # A dictionary that was handed out while parameters were unsharded holds them as such.
        state.tables.pop((place[0], dynamo_calls.current_tracer(tx)), None)
        if not read.kept:
            state.whole.pop(place, None)


def reshard(tx: InstructionTranslatorBase) -> None:
    """Read all parameters sharded from here on, until the next forward, and gather them anew then.

    As eager does behind a backward: the backward has used up the history of what was gathered, and
    the program goes on with the registered parameters and their gradients.
    """
    state = _reads_if_any(tx)
    if state is None or state.inside:
        return
    state.resharded += state.gathered.values()
    for table in (state.whole, state.gathered, state.tables, state.read):
        table.clear()


def is_whole(tx: InstructionTranslatorBase, wrapper: int) -> bool:
    """Return whether parameters of the wrapper with this id are read whole now."""
    return any(read.key[0] == wrapper for read in reads(tx).whole.values())


def is_any_unsharded(tx: InstructionTranslatorBase) -> bool:
    """Return whether a parameter has been read whole in the graph that is traced."""
    state = _reads_if_any(tx)
    return state is not None and bool(state.read)


def answer(tx: Any, tracker: Any, name: str) -> Any:
    """``module.name`` while tracing; None leaves it to upstream."""
    state = _reads_if_any(tx)
    if state is None or not state.whole:
        return None
    module = tracker.value
    read = state.whole.get((id(module), name))
    if name == "_parameters":
        return _table(tx, state, tracker)
    if (
        read is not None
        and (table := state.tables.get((id(module), dynamo_calls.current_tracer(tx)))) is not None
    ):
        return table.call_method(tx, "__getitem__", [dynamo_building.build(tx, name)], {})
    # RNNs read their parameters from a list of their own.
    if name == "_flat_weights" and isinstance(module, nn.RNNBase):
        names = [(id(module), each) for each in module._flat_weights_names]
        if all(each in state.whole for each in names):
            return dynamo_building.build_list(
                tx, [_gathered(tx, state.whole[each]) for each in names]
            )
    return None if read is None else _gathered(tx, read)


def _table(tx: Any, known: Reads, tracker: Any) -> object:
    """``module._parameters``, if some of them are whole: a dictionary that holds them as such."""
    module = tracker.value
    key = id(module), dynamo_calls.current_tracer(tx)
    if key not in known.tables:
        reads = {name: known.whole.get((id(module), name)) for name in vars(module)["_parameters"]}
        if not any(reads.values()):
            return None
        found = {
            name: dynamo_building.build_item(tx, tracker, "_parameters", name)
            if read is None
            else _gathered(tx, read)
            for name, read in reads.items()
        }
        known.tables[key] = dynamo_building.build_dict(tx, found)
    return known.tables[key]


def _gathered(tx: Any, read: Read) -> object:
    """One gather, and so one reduction, a parameter and graph: of tied weights too.

    It stands where the wrapper's forward began, as eager mode's does, and not in a checkpoint that
    the forward calls.
    """
    state = reads(tx)
    state.read.add(read.key)
    tracer = dynamo_calls.current_tracer(tx)
    if (outer := state.entered_in.get(read.key[0])) in dynamo_calls.open_tracers(tx):
        tracer = outer
    key = read.key, tracer
    if read.whole is not None:
        state.gathered[key] = read.whole
    if key not in state.gathered:
        assert read.gather is not None and read.build is not None
        with dynamo_calls.traced_into(tx, tracer):
            gather = dynamo_building.build_unchanging(tx, read.gather)
            args = [read.build(tx)]
            if read.leaf is not None:
                state.keeping[read.key] = read.leaf(tx)
                args.append(state.keeping[read.key])
            state.gathered[key] = gather.call_function(tx, args, {})
    return state.gathered[key]


# A forward that holds a graph break runs in eager mode as a whole: no graph may end between its
# hooks. Where it launches collectives it does so on all ranks; one that launches none (DDP's, in
# evaluation and under ``no_sync()``) is this rank's own affair, and says nothing of those that
# launch.
_broken: WeakKeyDictionary[object, set[bool]] = (
    WeakKeyDictionary()
)  # by whether the forward launches
_begun: WeakSet[object] = WeakSet()  # whose forward a trace has entered and not left
BROKEN = "A graph break lies inside its forward, on this rank or another."


def is_broken(wrapper: object, launches: bool = True) -> bool:
    """Return whether the forward of a wrapper runs in eager mode, because of a graph break
    inside.
    """
    return launches in _broken.get(wrapper, ())


def _mark_broken(wrapper: object, launches: bool = True) -> None:
    _broken.setdefault(wrapper, set()).add(launches)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # with all that it calls
def ran_eagerly(wrapper: object, launches: bool = True) -> None:
    """A wrapper's forward begins in eager mode: if a trace was given up inside, so it is on all
    ranks.
    """
    given_up = wrapper in _begun
    _begun.discard(wrapper)
    if given_up:
        _mark_broken(wrapper, launches)
    # Dynamo may have skipped the frame for good when a forward that launches nothing broke: it
    # traces no other either, and ranks that do would wait. Once they have chosen this is a plain
    # eager call.
    elif launches and is_broken(wrapper, False) and eager_fallback.is_open(wrapper):
        given_up = True
        _mark_broken(wrapper)
    if given_up and launches:
        eager_fallback.runs_in_graph(wrapper, False)


def take_kept_whole(tx: Any, loss: Any) -> list[tuple[Any, Any]]:
    """Take the gradients that former backwards of the graph have kept whole, of parameters that
    ``loss`` reduces. With each the gathered parameter that it belongs to; of a DTensor, its local
    tensor.
    """
    state = _reads_if_any(tx)
    found: list[tuple[Any, Any]] = []
    if state is None or not state.keeping:
        return found
    behind = dynamo_calls.history_of(loss)
    for (key, tracer), whole in state.gathered.items():
        leaf = state.keeping.get(key)
        if leaf is None or tracer is not dynamo_calls.current_tracer(tx):
            continue
        node = whole.as_proxy().node
        # Gathered for a backward that keeps too, it adds up where it is kept. A DTensor is made of
        # what the gather gave.
        gathers = (node, *node.all_input_nodes)
        if any(leaf.as_proxy().node in each.all_input_nodes for each in gathers):
            continue
        if has_gradient(tx, leaf) and node in behind:
            local = dynamo_building.call_traced(tx, _local, [whole], {})
            found.append((local, take_gradient(tx, leaf)))
    return found


def has_gradient(tx: Any, leaf: Any) -> bool:
    """Return whether a leaf has accumulated something, as the program has come so far."""
    gradient = dynamo_building.call_traced(tx, _gradient_of, [leaf], {})
    return not dynamo_building.realized(gradient).is_constant_none()


def take_gradient(tx: Any, leaf: Any) -> Any:
    """Return what a leaf has accumulated, and leave it without."""
    gradient = dynamo_building.call_traced(tx, _gradient_of, [leaf], {})
    dynamo_building.call_traced(tx, _without_gradient, [leaf], {})
    return gradient


def _local(whole: torch.Tensor) -> torch.Tensor:
    return whole.to_local() if isinstance(whole, DTensor) else whole


def _gradient_of(param: torch.Tensor) -> torch.Tensor | None:
    return param.grad


def _without_gradient(param: torch.Tensor) -> None:
    param.grad = None


def _ends(tx: InstructionTranslatorBase, breaks: bool) -> bool:
    """Keep nothing whole beyond the graph. Return whether a forward in it has to be left to
    eager mode.
    """
    state = _reads_if_any(tx)
    if state is None:
        return False
    # Dynamo would write the gathered tensors back into ``_parameters`` after the graph.
    gathered = [*state.gathered.values(), *state.resharded]
    dynamo_calls.forget_in_dictionaries(tx, {id(each) for each in gathered})
    # A wrapper whose forward the graph ends in: its parameters would be sharded again in the
    # middle.
    cannot = state.inside if breaks else []
    whole = eager_fallback.run_in_graph(state.outermost, cannot)
    left = [each for each, is_whole in zip(state.outermost, whole, strict=True) if not is_whole]
    for each in [*left, *cannot]:
        _mark_broken(each, id(each) not in state.quiet)
    # What the graph keeps unreduced at its end, a backward of its own hands over to FSDP2.
    keeps = dynamo_calls.holds_backward(tx) and any(
        has_gradient(tx, leaf) for leaf in state.keeping.values()
    )
    if state.entered and (dynamo_calls.lacks_gradients(tx) or keeps):
        dynamo_calls.expect_no_gradients(tx)
        return True
    return bool(left or cannot)


def _hook_after_accumulation(tx: Any, tensor: Any, args: list[Any]) -> object:
    """``register_post_accumulate_grad_hook`` of a parameter that is whole: on the gradient of
    the whole.
    """
    state = _reads_if_any(tx)
    if state is None or not any(tensor is each for each in state.gathered.values()):
        return None
    # In a graph nothing is accumulated before the reduction; the hook sees the gradient that would
    # be.
    hook = dynamo_building.call_traced(tx, _on_gradient, args, {})
    return tensor.call_method(tx, "register_hook", [hook], {})


class _Accumulated:
    """Stands for a parameter in a hook that runs after its gradient is accumulated."""

    def __init__(self, grad: torch.Tensor) -> None:
        self.grad = grad


def _on_gradient(hook: Callable[[object], None]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(grad: torch.Tensor) -> torch.Tensor:
        # The hook may write to ``param.grad``, and the gradient it was given may be used elsewhere.
        param = _Accumulated(grad.clone())
        hook(param)
        return param.grad

    return run


def patches() -> list[Patch]:
    """List the patches that enabling makes for parameters that are read whole."""
    return [
        *dynamo_modules.on_reads(answer),
        *dynamo_modules.on_tensor_method(
            "register_post_accumulate_grad_hook", _hook_after_accumulation
        ),
        *dynamo_calls.on_end(_ends),
    ]
