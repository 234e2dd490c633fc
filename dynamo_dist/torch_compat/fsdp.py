"""FSDP2's state of a module, read as plain data, and what its eager runtime may have left
pending.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed.fsdp._fully_shard._fsdp_init as _init
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather as _DefaultAllGather,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter as _DefaultReduceScatter,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo as _Replicated
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo as _Sharded
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState as _ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState
from torch.distributed.tensor import DTensor, Placement

from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction, has

PRE_FORWARD: Any = FSDPState._pre_forward
POST_FORWARD: Any = FSDPState._post_forward


@dataclass(frozen=True)
class ShardedParameter:
    """One parameter that FSDP2 shards.

    ``owners``: each module that it is registered in, and its name there. ``path``: its group of
        ``state``, and its place in that. ``size``: of the gathered parameter (local to tensor
        parallel ranks).
    ``dim``: the dimension that is split. ``shard``, ``replicate``: process groups, or None.
        ``dtype``: what it is gathered in, ``reduce_dtype`` what its gradient is summed in; None
        leaves them. ``divide``: what the sum of gradients is divided by; None for the number of
        ranks. ``kept``: it stays gathered after forward. ``before``: mesh, placements, global shape
        and stride of the DTensor it was before; or None.
    """

    owners: tuple[tuple[nn.Module, str], ...]
    path: tuple[int, int]
    size: torch.Size
    dim: int
    shard: Any
    replicate: Any
    dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    divide: float | None
    kept: bool
    before: tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]] | None


def hook_of(function: Any) -> Any:
    """Return the hook of one state that a hook shared by several modules stands for; else the
    function.
    """
    # A state for several modules registers one closure for all of them; its code is the same for
    # every state.
    if getattr(function, "__code__", None) not in _HOOK_CODES:
        return function
    found = inspect.unwrap(function, stop=inspect.ismethod)
    return found if inspect.ismethod(found) else function


_HOOK_CODES = {PRE_FORWARD.__code__, POST_FORWARD.__code__}


def groups(state: FSDPState) -> list[Any]:
    """The parameter groups of a state."""
    return list(state._fsdp_param_groups)


def steps(path: tuple[int, int]) -> tuple[str | int, ...]:
    """The attributes and places that lead from a state to a parameter's registered shard."""
    return ("_fsdp_param_groups", path[0], "fsdp_params", path[1], "sharded_param")


def decide_root(state: FSDPState) -> None:
    """Decide the root, dtypes and names, as the first forward does; raises what that raises."""
    # FSDP2 does this at the first forward, because only then it is known which module is the root.
    state._lazy_init()


def ranks(state: FSDPState) -> tuple[int, ...]:
    """Global ranks over which anything is sharded or copied that runs with a state."""
    found = [group for each in states_of_model(state) for group in groups(each)]
    meshes = [param._spmd_mesh for group in found for param in group.fsdp_params]
    return tuple(sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}))


def path_in_model(state: FSDPState) -> str:
    """Return the name of a state's module in its root, after ``decide_root``; "" for the root, and
    where nothing is sharded by it.
    """
    return next((group._module_fqn or "" for group in groups(state)), "")


def states_of_model(state: FSDPState) -> list[FSDPState]:
    """The states of all modules that share a root with one, after ``decide_root``."""
    return list(state._state_ctx.all_states)


def is_root(state: FSDPState) -> bool:
    """Return whether a state is the root's, after ``decide_root``."""
    return bool(state._is_root)


def runs_eagerly(state: FSDPState) -> bool:
    """Return whether a forward of the root is under way in eager mode."""
    return state._state_ctx.iter_forward_root is not None


def on_eager_forward(note: Callable[[Any], None]) -> list[Patch]:
    """Call ``note(state)`` when the root's forward begins in eager mode, before it launches
    anything.
    """

    def root_pre_forward(upstream: Upstream, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not runs_eagerly(self):
            note(self)
        return upstream(self, *args, **kwargs)

    return [WrapFunction(FSDPState, "_root_pre_forward", root_pre_forward)]


def on_sharding(check: Callable[[list[nn.Module], set[nn.Parameter]], None]) -> list[Patch]:
    """Call ``check(modules, ignored)`` with what ``fully_shard`` or ``replicate`` is about to
    manage; it may raise.

    ``_get_managed_modules`` was seen in 2.13 to 2.15; where it is missing nothing is changed.
    """

    def get_managed_modules(
        upstream: Upstream,
        roots: Any,
        ignored_params: set[nn.Parameter] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        found = upstream(roots, ignored_params, *args, **kwargs)
        check(found, ignored_params or set())
        return found

    if not has(
        _init, "_get_managed_modules", off="a model sharded after its compile is many graphs"
    ):
        return []
    return [WrapFunction(_init, "_get_managed_modules", get_managed_modules)]


def custom_sharding(state: FSDPState) -> str:
    """Return what of a state, or of the root whose eager forward it is in, has no counterpart in
    a graph, or "".
    """
    root = state._state_ctx.iter_forward_root
    for group in groups(state) + ([] if root is None else groups(root)):
        if any(param.offload_to_cpu for param in group.fsdp_params):
            return "CPUOffloadPolicy"
        if group._all_reduce_hook is not None:
            return "set_all_reduce_hook"
        if any(
            hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")
            for param in group.fsdp_params
        ):
            return "parameters with their own fsdp_pre_all_gather"
        if vars(group).get("reduce_scatter_unused_params"):
            return "set_reduce_scatter_unused_params"
        # It keeps parameters gathered between steps: what a graph gathers lives in the graph's own
        # memory.
        if torch.is_grad_enabled() and not group.reshard_after_backward:
            return "set_reshard_after_backward(False)"
        if has_odd_kept(group):
            return "gradients of some parameters that wait for set_requires_all_reduce(True)"
        for name, default in (
            ("_all_gather_comm", _DefaultAllGather),
            ("_reduce_scatter_comm", _DefaultReduceScatter),
        ):
            if type(vars(group)[name]) is not default:
                return f"custom communication ({type(vars(group)[name]).__name__})"
    return ""


def sharding_settings(state: FSDPState) -> tuple[Any, ...]:
    """What a program may set on a state after it was sharded, or has left in it, as far as a
    graph depends on it.
    """
    learns = torch.is_grad_enabled()
    return tuple(
        (
            # Without gradients none of these changes the graph, and a guard on them would recompile
            # for nothing.
            learns and (reductions(group), kept(group), *map(_hooks, group.fsdp_params)),
            learns and group.reshard_after_backward,
            group.post_forward_mesh_info is None,
            group.gradient_divide_factor,
            group._all_reduce_hook is None,
            type(group._all_gather_comm),
            type(group._reduce_scatter_comm),
            vars(group).get("reduce_scatter_unused_params", False),
        )
        for group in groups(state)
    )


def kept_gathered(state: FSDPState) -> list[tuple[int, int]]:
    """The paths of the parameters that stay gathered after a state's forward."""
    return [
        (g, p)
        for g, group in enumerate(groups(state))
        if group.post_forward_mesh_info is None
        for p in range(len(group.fsdp_params))
    ]


def sharded_parameters(state: FSDPState) -> Iterator[ShardedParameter]:
    """Every parameter of a state, after ``decide_root``."""
    for g, group in enumerate(groups(state)):
        for p in range(len(group.fsdp_params)):
            yield sharded_parameter(state, (g, p))


def sharded_parameter(state: FSDPState, path: tuple[int, int]) -> ShardedParameter:
    """One parameter of a state, after ``decide_root``. Raises IndexError."""
    group = groups(state)[path[0]]
    param = group.fsdp_params[path[1]]
    mesh, info = param.mesh_info, param._module_info
    # Set only where the parameter was a DTensor before, as under tensor parallelism.
    spec = vars(param).get("_unsharded_dtensor_spec")
    shared = zip(info.shared_modules, info.shared_param_names, strict=True)
    return ShardedParameter(
        ((info.module, info.param_name), *shared),
        path,
        param._orig_size,
        param.fsdp_placement.dim,
        mesh.shard_process_group if isinstance(mesh, _Sharded) else None,
        mesh.replicate_process_group if isinstance(mesh, _Replicated) else None,
        param.param_dtype,
        param.reduce_dtype,
        group.gradient_divide_factor,
        group.post_forward_mesh_info is None,
        None if spec is None else (spec.mesh, spec.placements, spec.shape, spec.stride),
    )


def sharded(state: FSDPState, path: tuple[int, int]) -> nn.Parameter:
    """The registered parameter, whether or not it is gathered now."""
    param: nn.Parameter = groups(state)[path[0]].fsdp_params[path[1]].sharded_param
    return param


def all_sharded(state: FSDPState) -> Iterator[nn.Parameter]:
    """The registered parameters of a state, gathered now or not, before ``decide_root`` too."""
    for group in groups(state):
        for param in group.fsdp_params:
            yield param.sharded_param


def sharded_moves(
    state: FSDPState,
) -> tuple[torch.device | None, torch.dtype | None, torch.dtype | None]:
    """The device and dtype that inputs of forward are brought to, and the dtype of outputs; None
    leaves them.
    """
    policy, device = state._mp_policy, state._device
    # FSDP2 moves the inputs of the root alone; those of modules inside are on the device already.
    goes = state._is_root and device.type != "cpu"
    into = policy.param_dtype if policy.cast_forward_inputs else None
    return device if goes else None, into, policy.output_dtype


def modules(state: FSDPState) -> tuple[nn.Module, ...]:
    """The modules that one state is for: those of a list given to ``fully_shard``."""
    return tuple(state._modules)


def reductions(group: Any, attribute: Callable[[object, str], Any] = getattr) -> tuple[bool, bool]:
    """Return whether gradients of a group are reduced in the next backward: over shards, and
    over copies too. ``attribute(object, name)`` reads what a program may have set.
    """
    has_copies = isinstance(group.mesh_info, _Replicated)
    copies = attribute(group, "all_reduce_grads") if has_copies else True
    return attribute(group, "reduce_grads"), copies


def kept(group: Any) -> tuple[bool, bool]:
    """Return whether gradients of former backwards wait for their reduction: whole ones, and
    those reduced over shards.
    """
    wholes = any(
        param.unsharded_accumulated_grad is not None or _unsharded_grad(param) is not None
        for param in group.fsdp_params
    )
    return wholes, group._partial_reduce_output is not None


def has_odd_kept(group: Any) -> bool:
    """Return whether the kept gradient was reduced over shards for only some of the parameters.

    It does not say for which ones.
    """
    flat = group._partial_reduce_output
    return flat is not None and flat.numel() != _place_in_flat(group, len(group.fsdp_params))


def _unsharded_grad(param: object) -> torch.Tensor | None:
    unsharded = vars(param).get("_unsharded_param")
    return None if unsharded is None else unsharded.grad


def keep_unsharded(state: FSDPState, path: tuple[int, int], grad: torch.Tensor) -> None:
    """Leave a gradient of the gathered parameter where FSDP2 leaves it in a backward that does
    not reduce.
    """
    param = groups(state)[path[0]].fsdp_params[path[1]]
    grad = as_before(state, path, grad)
    if param.unsharded_accumulated_grad is None:
        param.unsharded_accumulated_grad = grad
    else:
        param.unsharded_accumulated_grad += grad


def as_before(state: FSDPState, path: tuple[int, int], local: torch.Tensor) -> torch.Tensor:
    """A tensor like the gathered parameter, as the DTensor that this was before FSDP2, if any."""
    spec = sharded_parameter(state, path).before
    if spec is None:
        return local
    mesh, placements, shape, stride = spec
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def take_unsharded(state: FSDPState, path: tuple[int, int]) -> torch.Tensor | None:
    """Take the gradients of a gathered parameter that wait for their reduction, local to tensor
    parallel ranks.
    """
    param = groups(state)[path[0]].fsdp_params[path[1]]
    # FSDP2 has two places: gradients in another reduce dtype accumulate in the first, others on the
    # unsharded parameter.
    found = [param.unsharded_accumulated_grad, _unsharded_grad(param)]
    param.unsharded_accumulated_grad = None
    if found[1] is not None:
        param._unsharded_param.grad = None
    inner = [param._get_grad_inner_tensor(each) for each in found if each is not None]
    if not inner:
        return None
    return inner[0] if len(inner) == 1 else inner[0] + inner[1]


def leave_unsharded(state: FSDPState, path: tuple[int, int], whole: torch.Tensor) -> nn.Parameter:
    """Register a gathered parameter in place of its shard, as FSDP2 does until ``reshard``;
    return it.
    """
    group = groups(state)[path[0]]
    param = group.fsdp_params[path[1]]
    found = nn.Parameter(whole, requires_grad=param.sharded_param.requires_grad)
    # FSDP2 registers the same tensor at each gather, so a hook that is put on it stays.
    found._backward_hooks = _hooks_of_left.setdefault(param, OrderedDict())
    # On every module that shares the parameter, as FSDP2's own unshard does.
    param._setattr_on_modules(found)
    param.sharded_state = group._sharded_state = _ShardedState.UNSHARDED
    return found


def is_registered(state: FSDPState, path: tuple[int, int], param: nn.Parameter | None) -> bool:
    """Return whether modules hold this tensor for a parameter of a state."""
    info = groups(state)[path[0]].fsdp_params[path[1]]._module_info
    return param is not None and info.module._parameters.get(info.param_name) is param


def reshard(state: FSDPState) -> None:
    """Register the shards again; nothing is launched."""
    for group in groups(state):
        group._to_sharded()


def _place_in_flat(group: Any, number: int) -> int:
    """Where in the flat output of a group's reduce-scatter the parameter of this number begins."""
    before = group.fsdp_params[:number]
    # Frozen parameters take no part in the reduce-scatter.
    return sum(p._sharded_param_data.numel() for p in before if p.sharded_param.requires_grad)


def keep_partial(state: FSDPState, path: tuple[int, int], grad: torch.Tensor) -> None:
    """Add a gradient that was reduced over shards to what FSDP2 keeps of its group, for the sum
    over copies.
    """
    group = groups(state)[path[0]]
    if group._partial_reduce_output is None:
        size = _place_in_flat(group, len(group.fsdp_params))
        # FSDP2 keeps one flat tensor for the whole group; parameters that add nothing leave zeros.
        group._partial_reduce_output = grad.new_zeros(size)
    start = _place_in_flat(group, path[1])
    group._partial_reduce_output[start : start + grad.numel()].add_(grad.reshape(-1))


def partial(state: FSDPState, path: tuple[int, int]) -> torch.Tensor | None:
    """What FSDP2 keeps of one parameter's gradient for the sum over copies, as it lies;
    ``drop_partial`` ends it.
    """
    group = groups(state)[path[0]]
    if group._partial_reduce_output is None:
        return None
    start, end = _place_in_flat(group, path[1]), _place_in_flat(group, path[1] + 1)
    found: torch.Tensor = group._partial_reduce_output[start:end]
    return found


def drop_partial(state: FSDPState, path: tuple[int, int]) -> None:
    """Forget what was kept for the sum over copies of a group, once all of it is in that sum."""
    groups(state)[path[0]]._partial_reduce_output = None


def gathered_hooks(state: FSDPState, path: tuple[int, int]) -> list[Callable[..., Any]]:
    """The hooks that a program has put on a parameter while it was gathered.

    Those on its shard are others, which FSDP2 never calls.
    """
    return _gathered_hooks(groups(state)[path[0]].fsdp_params[path[1]])


# By FSDP2's parameter: hooks on what graphs have left gathered of it.
_hooks_of_left: WeakKeyDictionary[Any, OrderedDict[int, Any]] = WeakKeyDictionary()


def _gathered_hooks(param: Any) -> list[Callable[..., Any]]:
    unsharded = vars(param).get("_unsharded_param")
    own = None if unsharded is None else unsharded._backward_hooks
    left = _hooks_of_left.get(param)
    return [*(left or {}).values(), *(() if own is left else (own or {}).values())]


def _hooks(param: Any) -> tuple[bool, bool]:
    """Return whether hooks are on a parameter's shard, and on what is gathered of it."""
    return bool(param.sharded_param._backward_hooks), bool(_gathered_hooks(param))


def call_left_hooks_eagerly(root: FSDPState) -> None:
    """Put hooks on what graphs have left gathered on FSDP2's own tensors too."""
    for group in [group for state in states_of_model(root) for group in groups(state)]:
        for param in group.fsdp_params:
            hooks = _hooks_of_left.get(param)
            if not hooks:
                continue
            if "_unsharded_param" not in vars(param):
                # As the first gather makes it.
                inputs = param.all_gather_inputs
                mesh = param.mesh_info
                ranks = mesh.shard_mesh_size if isinstance(mesh, _Sharded) else 1
                param.init_all_gather_outputs(
                    [each.numel() for each in inputs],
                    [each.dtype for each in inputs],
                    ranks,
                    inputs[0].device,
                )
                param.init_unsharded_param()
                param.free_unsharded_param()
            own = param._unsharded_param._backward_hooks
            if own is not hooks:
                hooks.update(own or {})
                param._unsharded_param._backward_hooks = hooks


def free_gathered(root: FSDPState) -> None:
    """Free what eager calls have left gathered."""
    for group in [group for state in states_of_model(root) for group in groups(state)]:
        # The gather still writes to its buffer, which must not be freed before it has ended.
        if group._all_gather_result is not None:  # asked for ahead, and never waited for
            group.wait_for_unshard()
        if not group.is_sharded:
            group._to_sharded()
