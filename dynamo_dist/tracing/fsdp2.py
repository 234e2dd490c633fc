"""FSDP2 in a compiled function: its gathers and reductions are operations of the graph.

``fully_shard`` gathers in hooks around a module's forward, into storages that grow and shrink, and
reduces in hooks of autograd. Here those hooks do nothing while a call is traced; a parameter reads
as its gather, whose backward reduces into the registered shard. FSDP2's own runtime is not entered,
and goes on from where it was in the next eager call.

``fully_shard`` puts new parameters in place of the old ones, and torch lets a step of the old ones
pass without a word.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from dynamo_dist.torch_compat import (
    aot_gradients,
    dynamo_building,
    dynamo_calls,
    dynamo_guards,
    dynamo_modules,
    fsdp,
)
from dynamo_dist.torch_compat.dynamo_calls import computes_gradients
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import eager_fallback, unsharded_parameters
from dynamo_dist.tracing.fsdp2_gather import (
    HOOKS,
    KEEPERS,
    PARTIAL,
    WHOLE,
    Gather,
    Ranks,
    TensorParallel,
    cast_floating,
)
from dynamo_dist.tracing.unsharded_parameters import Place, Read

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase, VariableTracker

_Kind = TypeVar("_Kind")
log = logging.getLogger(__name__)
_checked_states: WeakSet[object] = WeakSet()


def warn_of_stale_optimizers(state: object, root: nn.Module) -> None:
    """Warn, once for a state of FSDP2, of optimizers that hold what were ``root``'s parameters
    before it was sharded.

    Such an optimizer is recognised by its parameters: no module holds one of them, and their shapes
    are those of at least half of the root's. The search looks at all objects of the process, so it
    runs only once, and it looks at modules only where an optimizer may be one.
    """
    # gc.get_objects() walks the whole process, so the search runs once for each root.
    if state in _checked_states:
        return
    _checked_states.add(state)
    own = {id(param) for param in root.parameters()}
    shapes = Counter(param.shape for param in root.parameters())
    suspects = []
    for optimizer in _alive(Optimizer):
        held = [p for group in vars(optimizer).get("param_groups", ()) for p in group["params"]]
        found = Counter(param.shape for param in held)
        if (
            own.isdisjoint(map(id, held))
            and found <= shapes
            # An optimizer may hold a part of the parameters only; less than half is taken for
            # another model's.
            and 2 * len(held) >= shapes.total() > 0
        ):
            suspects.append((optimizer, held))
    if not suspects:
        return
    # Only now, for suspects: an optimizer whose parameters some module still holds is in use.
    owned = {id(param) for module in _alive(nn.Module) for param in _parameters(module)}
    for optimizer, held in suspects:
        if owned.isdisjoint(map(id, held)):
            kind = type(optimizer).__name__
            log.warning(
                "%s holds %d parameters that no module has, in the shapes of those of %s: it was "
                "made before fully_shard put others in their place. Its steps change nothing of "
                "the model, in eager mode too. Make it afterwards: %s(model.parameters(), ...).",
                kind,
                len(held),
                type(root).__name__.removeprefix("FSDP"),
                kind,
            )


def _alive(kind: type[_Kind]) -> list[_Kind]:
    """All objects of this process that are of a type; isinstance asks the object, and a proxy
    answers for another.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


def _parameters(module: nn.Module) -> Iterator[torch.Tensor | None]:
    yield from vars(module).get("_parameters", {}).values()
    state = dynamo_modules.module_state(module)
    if isinstance(state, fsdp.FSDPState):
        yield from fsdp.all_sharded(state)


_WHY = (
    "FSDP2 gathers a module's parameters before its forward and frees them after it, in storages "
    "that grow and shrink: it runs around a graph, not in one."
)
_FIX = (
    "Compile the sharded blocks instead of what calls them:\n"
    "    for block in model.layers:\n"
    "        block.compile()\n"
    "        fully_shard(block)"
)


class _Sharded:
    """Leaves that graphs read for one state of FSDP2, beside its parameters.

    ``kept`` take gradients that are not reduced yet, each with the storage of one number;
    ``unhooked`` stand for parameters with hooks, which FSDP2 never calls: it sets their gradients,
    and does not accumulate them.
    """

    def __init__(self, state: Any, key: str) -> None:
        self.state: Callable[[], Any] = ref(state)
        self.key = key
        self.kept: list[torch.Tensor] = []
        self.unhooked: list[torch.Tensor] = []
        self._places: dict[object, int] = {}
        inside = [each for owner in fsdp.modules(state) for each in owner.modules()]
        self.hooks = unsharded_parameters.HookVersions(inside)
        self._left: dict[
            tuple[int, int], Any
        ] = {}  # weak references to what ``unsharded`` registered
        KEEPERS[key] = self

    def place_of_kept(self, param: fsdp.ShardedParameter, gather: Gather) -> int:
        """Where in ``kept`` the leaf is that takes what ``gather`` keeps of a parameter's
        gradient.
        """
        shard = fsdp.sharded(self.state(), param.path)
        size, dtype = gather.kept_like(param.size, shard.dtype)
        kind = param.path, gather.keeps, dtype
        if kind not in self._places:
            # One number expanded to the size: autograd asks for the shape, and nobody reads the
            # values.
            leaf = torch.zeros(1, dtype=dtype, device=shard.device).expand(size).detach()
            keep = fsdp.keep_unsharded if gather.keeps == WHOLE else fsdp.keep_partial
            leaf.requires_grad_().register_post_accumulate_grad_hook(
                functools.partial(_keep, self.key, param.path, keep)
            )
            self._places[kind] = len(self.kept)
            self.kept.append(leaf)
        return self._places[kind]

    def place_of_unhooked(self, path: tuple[int, int]) -> int:
        """Where in ``unhooked`` the leaf is that a parameter with hooks is read as."""
        shard = fsdp.sharded(self.state(), path)
        # With its storage, as a loaded checkpoint may put the parameter elsewhere.
        kind = path, aot_gradients.local_of(shard).data_ptr()
        if kind not in self._places:
            leaf = shard.detach().requires_grad_()
            leaf.register_post_accumulate_grad_hook(functools.partial(_hand_over, ref(shard)))
            self._places[kind] = len(self.unhooked)
            self.unhooked.append(leaf)
        return self._places[kind]

    @property
    def unsharded(self) -> list[torch.Tensor]:
        """What a graph gathered of the parameters, in ``fsdp.kept_gathered``'s order.

        It is set after the graph. FSDP2 leaves them unsharded until backward, for uses outside of
        the forward. What those accumulate waits for the reduction of the graph's backward.
        """
        raise AttributeError("unsharded")

    @unsharded.setter
    def unsharded(self, wholes: list[torch.Tensor]) -> None:
        state = self.state()
        # A setter, because Dynamo's side effects can set an attribute after the graph but call
        # nothing.
        for path, whole in zip(fsdp.kept_gathered(state), wholes, strict=True):
            leaf = fsdp.leave_unsharded(state, path, whole)
            self._left[path] = ref(leaf)
            if leaf.requires_grad:
                keep = functools.partial(_keep, self.key, path, fsdp.keep_unsharded)
                leaf.register_post_accumulate_grad_hook(keep)

    def reshard_after_backward(self) -> None:
        """``reshard`` the whole model when the backward has run that is under way."""
        if self._left:
            # Not at once: uses of the parameter outside of the forward still need it in this
            # backward.
            aot_gradients.call_after_backward(self.reshard)

    def reshard(self) -> None:
        """Free what graphs have left unsharded of the model, as the end of a backward does for
        FSDP2: of modules too that the backward did not reach.
        """
        for state in fsdp.states_of_model(self.state()):
            owner = _sharded_by_state.get(state)
            if owner is not None and owner._left:
                left = owner._left.items()
                if any(fsdp.is_registered(state, path, leaf()) for path, leaf in left):
                    fsdp.reshard(state)
                owner._left.clear()

    def take(self, path: tuple[int, int], what: str) -> torch.Tensor | None:
        """What was kept of a parameter's gradient in former backwards, or by uses outside of the
        forward.
        """
        state = self.state()
        self.reshard_after_backward()
        if what == WHOLE:
            return fsdp.take_unsharded(state, path)
        # The flat tensor is the whole group's: other parameters have yet to take their parts.
        aot_gradients.call_after_backward(functools.partial(fsdp.drop_partial, state, path))
        return fsdp.partial(state, path)

    def call_hooks(self, path: tuple[int, int], grad: torch.Tensor) -> torch.Tensor:
        """The gradient of a gathered parameter, as the hooks on it leave it."""
        state = self.state()
        grad = fsdp.as_before(state, path, grad)
        for hook in fsdp.gathered_hooks(state, path):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad.to_local() if isinstance(grad, DTensor) else grad


def _keep(key: str, path: tuple[int, int], keep: Callable[..., None], leaf: torch.Tensor) -> None:
    owner: Any = KEEPERS[key]
    if any(
        leaf is each for each in owner.kept
    ):  # by a graph's backward, not by a use outside of it
        owner.reshard_after_backward()
    if leaf.grad is not None:
        grad, leaf.grad = leaf.grad, None
        keep(owner.state(), path, grad)


def _hand_over(param: Any, leaf: torch.Tensor) -> None:
    grad, leaf.grad = leaf.grad, None
    owner = param()
    # The shard may have been replaced since, as by a checkpoint: nobody waits for this gradient.
    if grad is None or owner is None:
        return
    # Out of place, since the sum may be what a program has kept a reference to.
    owner.grad = grad if owner.grad is None else owner.grad + grad
    # A copy, as a hook may remove itself.
    for hook in tuple((owner._post_accumulate_grad_hooks or {}).values()):
        hook(owner)


def is_own_hook(hook: object) -> bool:
    """Return whether a hook after accumulation is what a leaf here has in place of the user's."""
    return isinstance(hook, functools.partial) and hook.func in (_keep, _hand_over)


def keeps_whole(hook: object) -> bool:
    """Return whether a hook after accumulation is what keeps a gradient that no rank reduces."""
    return (
        isinstance(hook, functools.partial)
        and hook.func is _keep
        and hook.args[2] is fsdp.keep_unsharded
    )


_sharded_by_state: WeakKeyDictionary[Any, _Sharded] = WeakKeyDictionary()


def shards_in_graph(module: nn.Module) -> bool:
    """Return whether a module is sharded by FSDP2, and in ways that a graph can hold."""
    state = dynamo_modules.module_state(module)
    return isinstance(state, fsdp.FSDPState) and not fsdp.custom_sharding(state)


def is_called_eagerly(module: nn.Module) -> bool:
    """Return whether the module is called by one that FSDP2 runs in eager mode."""
    state = dynamo_modules.module_state(module)
    return isinstance(state, fsdp.FSDPState) and fsdp.runs_eagerly(state)


def _pre_forward(
    tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    receiver, module, inputs, keywords = args
    state: Any = dynamo_building.python_object(receiver)
    known = unsharded_parameters.reads(tx)
    # The hook of a state for several modules runs for each of them; the first one enters.
    if state not in known.inside:
        # FSDP2's root decides for all states in it, so only the outermost one is checked for a
        # root's settings.
        outermost = not known.inside
        _refuse(state, outermost)
        fsdp.decide_root(state)
        if outermost:
            warn_of_stale_optimizers(state, dynamo_building.python_object(module))
        _guard(tx, state, outermost)
        unsharded_parameters.enter(tx, state, _table(tx, state), fsdp.ranks(state))
    device, dtype, _ = fsdp.sharded_moves(state)
    if device is None and dtype is None:
        return dynamo_modules.build_tuple(tx, [inputs, keywords])
    call = [dynamo_building.build(tx, device), dynamo_building.build(tx, dtype), inputs, keywords]
    return dynamo_building.call_traced(tx, _given, call, {})


def _post_forward(
    tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    receiver, module, _, output = args
    state: Any = dynamo_building.python_object(receiver)
    known = unsharded_parameters.reads(tx)
    run = known.run.setdefault(id(state), set())
    run.add(id(dynamo_building.python_object(module)))
    # FSDP2 reshards after the last module of a list, in whatever order they run.
    if len(run) >= len(fsdp.modules(state)):  # of a list of modules, all have
        run.clear()
        unsharded_parameters.leave(tx, state, _table(tx, state))
        _refuse_unread(tx, state)
        _leave_unsharded(tx, state)
    _, _, dtype = fsdp.sharded_moves(state)
    if dtype is None:
        return output
    return dynamo_building.call_traced(
        tx, cast_floating, [dynamo_building.build(tx, dtype), output], {}
    )


def _refuse_unread(tx: InstructionTranslatorBase, state: Any) -> None:
    """Break where FSDP2 does something about a parameter that the graph has not read."""
    read = unsharded_parameters.reads(tx).read
    for param in fsdp.sharded_parameters(state):
        if (id(state), param.path) in read:
            continue
        if any(fsdp.kept(fsdp.groups(state)[param.path[0]])) and _gather(tx, param, state).takes:
            why = "waits for the reduction of its gradient"
        elif param.kept and fsdp.is_root(state):
            why = "stays gathered behind the forward, for uses outside of it"
        else:
            continue
        dynamo_building.graph_break(
            "FSDP2 module called in a compiled function",
            "fully_shard",
            f"Its parameter {param.owners[0][1]!r} {why}, and the forward does not read it.",
            _FIX,
        )


def _leave_unsharded(tx: Any, state: Any) -> None:
    """Leave gathered what FSDP2 does, for uses after the forward, until a backward frees it.

    Of modules inside the root only where no gradients are asked for: leaving a parameter and
    adding what a loss read of it takes some 40 us each on the host, in every step.
    """
    paths = fsdp.kept_gathered(state)
    learns = torch.is_grad_enabled()
    if not paths or computes_gradients(tx) or (learns and not fsdp.is_root(state)):
        return
    # The backward of one that is trained reshards: what no backward frees stays as it is, a shard.
    if learns and not any(fsdp.sharded(state, path).requires_grad for path in paths):
        return
    gathered, tracer = unsharded_parameters.reads(tx).gathered, dynamo_calls.current_tracer(tx)
    wholes = [gathered.get(((id(state), path), tracer)) for path in paths]
    # A tensor of a subgraph cannot leave it, so FSDP2 gathers again for later uses.
    if any(each is None for each in wholes):  # read in a graph inside alone, such as a checkpoint's
        return
    detached = dynamo_building.call_traced(
        tx, _detached, [dynamo_building.build_list(tx, wholes)], {}
    )
    tracker = dynamo_building.build_by_weakref(tx, _sharded(state))
    dynamo_building.set_after_graph(tx, tracker, "unsharded", detached)


def _detached(wholes: list[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach() for each in wholes]


def _given(
    device: torch.device | None, dtype: torch.dtype | None, args: object, kwargs: object
) -> tuple[object, object]:
    """The arguments as forward gets them: on the root's device, in the policy's dtype."""
    given = (args, kwargs)
    if device is not None:
        given = tree_map_only(torch.Tensor, lambda each: each.to(device), given)
    if dtype is not None:
        given = cast_floating(dtype, given)
    return given


def _refuse(state: Any, outermost: bool) -> None:
    """Break where a graph cannot hold what the state asks for."""
    if custom := fsdp.custom_sharding(state):
        why, fix = f"A graph has no counterpart of its {custom}. {_WHY}", _FIX
    elif unsharded_parameters.is_broken(state):
        why, fix = f"{unsharded_parameters.BROKEN} {_WHY}", "Mend that break first."
    elif outermost and fsdp.runs_eagerly(state):
        why, fix = _WHY, _FIX
    else:
        return
    dynamo_building.graph_break(
        "FSDP2 module called in a compiled function", "fully_shard", why, fix
    )


def _guard(tx: Any, state: Any, outermost: bool) -> None:
    """Guard what tracing read of the state; before the graph, free what eager left gathered."""
    tracker = dynamo_building.build_by_weakref(tx, state)
    dynamo_guards.guard(tracker, dynamo_guards.value_guard("settings", fsdp.sharding_settings))
    if outermost:
        dynamo_guards.guard(tracker, dynamo_guards.value_guard("eager forward", fsdp.runs_eagerly))
        dynamo_guards.guard(tracker, dynamo_guards.value_guard("hooks of modules", _hooks_version))
        dynamo_calls.call_before_graph(tx, tracker.source, fsdp.free_gathered)


def _table(tx: InstructionTranslatorBase, state: Any) -> Iterator[tuple[Place, Read]]:
    source = dynamo_building.build_by_weakref(tx, state).source
    sharded = _sharded(state)
    for param in fsdp.sharded_parameters(state):
        key = id(state), param.path
        gather = _gather(tx, param, state)
        registered = _registered(state, source, param.path)
        if fsdp.sharded(state, param.path)._backward_hooks:
            registered = _leaf(sharded, "unhooked", sharded.place_of_unhooked(param.path))
        kept = None
        if gather.keeps:
            kept = _leaf(sharded, "kept", sharded.place_of_kept(param, gather))
        read = Read(key, gather, registered, param.kept, leaf=kept)
        for owner, name in param.owners:
            yield (id(owner), name), read


def _leaf(sharded: _Sharded, name: str, place: int) -> Callable[[Any], Any]:
    def build(tx: Any) -> Any:
        source = dynamo_building.build_by_weakref(tx, sharded).source
        value = getattr(sharded, name)[place]
        return dynamo_building.build(tx, value, dynamo_building.member_source(source, name, place))

    return build


def _sharded(state: Any) -> _Sharded:
    if state not in _sharded_by_state:
        params = [
            (name, param.dim, None if param.shard is None else param.shard.size())
            for param in fsdp.sharded_parameters(state)
            for _, name in param.owners
        ]
        path, ranks = fsdp.path_in_model(state), fsdp.ranks(state)
        _sharded_by_state[state] = _Sharded(state, eager_fallback.name(state, path, params, ranks))
    return _sharded_by_state[state]


def _hooks_version(state: object) -> int:
    return _sharded(state).hooks.version()


def _registered(state: Any, source: object, path: tuple[int, int]) -> Callable[[object], object]:
    """The registered shard, from the state: modules may hold a gathered one just now."""
    steps = dynamo_building.member_source(source, *fsdp.steps(path))
    return lambda tx: dynamo_building.build(tx, fsdp.sharded(state, path), steps)


def _gather(tx: Any, param: fsdp.ShardedParameter, state: Any) -> Gather:
    keeps, takes = "", ""
    group = fsdp.groups(state)[param.path[0]]
    if torch.is_grad_enabled() and fsdp.sharded(state, param.path).requires_grad:
        # Set by ``set_requires_gradient_sync`` and ``set_requires_all_reduce``, for gradient
        # accumulation.
        set_so_far = functools.partial(dynamo_building.attribute_so_far, tx)
        reduces, all_reduces = fsdp.reductions(group, set_so_far)
        keeps = PARTIAL if reduces and not all_reduces else "" if reduces else WHOLE
        words = zip((WHOLE, PARTIAL), fsdp.kept(group), strict=True)
        # What is left as it is adds up where it is kept; only what goes further is taken.
        waits = [each for each, is_kept in words if is_kept]
        if WHOLE not in waits and param.kept and fsdp.is_root(state) and not computes_gradients(tx):
            waits.append(WHOLE)  # of uses behind the forward
        takes = " ".join(each for each in waits if _is_behind(keeps, each))
        if fsdp.gathered_hooks(state, param.path):
            takes = f"{HOOKS} {takes}".rstrip()
    return Gather(
        rows=param.size[param.dim],
        # FSDP2 launches nothing in a group of one rank.
        shard=_ranks(param.shard),
        replicate=_ranks(param.replicate),
        param_dtype=param.dtype,
        reduce_dtype=param.reduce_dtype,
        reshard_after_forward=not param.kept,
        tensor_parallel=None if param.before is None else TensorParallel(*param.before),
        dim=param.dim,
        divide=param.divide,
        keeps=keeps,
        takes=takes,
        key="/".join(map(str, (_sharded(state).key, *param.path))) if takes else "",
        group=f"{_sharded(state).key}/{param.path[0]}",
    )


def _is_behind(keeps: str, kept: str) -> bool:
    """Return whether a backward that keeps so much reduces what was kept of former ones further."""
    return not keeps or (keeps == PARTIAL and kept == WHOLE)


def _ranks(group: Any) -> Ranks | None:
    return None if group is None or group.size() == 1 else Ranks(group.group_name, group.size())


def _refuse_method(name: str) -> Callable[..., object]:
    """Break the graph where the program gathers or frees parameters itself."""

    def refuse(
        tx: InstructionTranslatorBase,
        args: list[VariableTracker],
        kwargs: dict[str, VariableTracker],
    ) -> object:
        dynamo_building.graph_break(
            "Parameters of an FSDP2 module gathered or freed in a compiled function",
            f"FSDPModule.{name}",
            _WHY,
            f"Call it around the compiled function: model.{name}(); y = compiled(x)",
        )

    return refuse


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ran_eagerly(state: Any) -> None:
    unsharded_parameters.ran_eagerly(state)
    if state in _sharded_by_state:
        _sharded_by_state[state].reshard()
        fsdp.call_left_hooks_eagerly(state)


def fsdp_answers() -> dict[object, Callable[..., object]]:
    """What is traced in place of FSDP2's hooks and methods, by function."""
    return {
        fsdp.PRE_FORWARD: _pre_forward,
        fsdp.POST_FORWARD: _post_forward,
        FSDPModule.unshard: _refuse_method("unshard"),
        FSDPModule.reshard: _refuse_method("reshard"),
    }


def patches() -> list[Patch]:
    """List the patches that enabling makes for sharding, and for eager calls of sharded modules."""
    return fsdp.on_eager_forward(_ran_eagerly)
