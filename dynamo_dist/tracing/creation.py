"""Groups and meshes made while tracing: an equal one that exists, or a break that says what to do.

Making one is collective. Evaluated while a single rank recompiles, it waits for ranks that never
come. So nothing is made while tracing: every rank remembers what was made since ``enable()``, by
arguments and also where it is not a member, and the traced call gets the equal one. All ranks make
the same ones in the same order, so all find one or none does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dynamo_dist.torch_compat import (
    c10d,
    dynamo_building,
    dynamo_guards,
    dynamo_meshes,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import OwnState, Patch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dynamo_dist.torch_compat import InstructionTranslatorBase, VariableTracker

BREAK = "Process group or mesh created while tracing"
WHY = (
    "Creating one is collective: if a single rank recompiles, it waits for the others for ever. "
    "No equal one has been created since dynamo_dist was enabled."
)

# Arguments by which two groups are equal; any other one that is given makes a group of its own.
_GROUP_KEY = ("ranks", "backend", "use_local_synchronization")
_IGNORED = frozenset({"timeout", "group_desc"})

# Arguments by which two meshes are equal.
_MESH = ("device_type", "mesh_shape", "mesh", "mesh_dim_names")

Creation = dict[Hashable, Any]


class Memory(OwnState):
    """The groups and meshes made since ``enable()``. The first of equal ones stays as long as it
    is alive.
    """

    def __init__(self) -> None:
        self.groups: Creation = {}
        # With the default group of its time: after another start, names stand for other groups.
        self.meshes: dict[Hashable, tuple[DeviceMesh, Any]] = {}
        self.concatenated: Creation = {}

    def apply(self) -> None:
        """As a change: start from nothing, and forget everything at the end."""
        self.groups.clear()
        self.meshes.clear()
        self.concatenated.clear()

    undo = apply

    def on_group(self, arguments: Mapping[str, object], group: ProcessGroup) -> None:
        """Remember a group by the arguments it was made with."""
        key = group_key(arguments)
        if key is not None and not _is_alive(self.groups.get(key)):
            self.groups[key] = group

    def on_mesh(self, mesh: DeviceMesh) -> None:
        """Remember a mesh by what it is made of."""
        if dynamo_meshes.keeps_order_of_ranks(mesh):
            return
        with dynamo_meshes.no_modes():
            key = mesh_key(mesh.device_type, mesh.mesh, mesh.mesh_dim_names)
        if self._alive_mesh(key) is None:
            self.meshes[key] = mesh, dist.group.WORLD

    def group(self, arguments: Mapping[str, Any]) -> Any:
        """The equal group, ``NON_GROUP_MEMBER`` where this rank is none of its members, or None."""
        key = group_key(arguments)
        found = self.groups.get(key) if key is not None else None
        return found if _is_alive(found) else None

    def mesh(
        self, device_type: str, ranks: torch.Tensor, names: tuple[str, ...] | None
    ) -> DeviceMesh | None:
        """The equal mesh, or None."""
        return self._alive_mesh(mesh_key(device_type, ranks, names))

    def _alive_mesh(self, key: Hashable) -> DeviceMesh | None:
        mesh, world = self.meshes.get(key, (None, None))
        if mesh is None or world is not dist.group.WORLD:
            return None
        groups = c10d.groups_of_mesh(mesh)
        alive = groups and all(c10d.is_registered_group(group) for group in groups)
        return mesh if alive else None


MEMORY = Memory()


def group_key(arguments: Mapping[str, Any]) -> Hashable | None:
    """Equal keys, equal groups; None for a group that nothing else can stand for."""
    own = {k: v for k, v in arguments.items() if k not in (*_GROUP_KEY, *_IGNORED)}
    if any(v not in (None, True) for v in own.values()):
        return None
    ranks = arguments.get("ranks")
    world = range(dist.get_world_size())
    members = tuple(world if ranks is None else sorted(ranks))
    return (members, *(arguments.get(name) or None for name in _GROUP_KEY[1:]))


def mesh_key(device_type: str, ranks: torch.Tensor, names: tuple[str, ...] | None) -> Hashable:
    """Device type, shape, ranks in order, and names."""
    return (
        device_type,
        tuple(ranks.shape),
        tuple(ranks.flatten().tolist()),
        tuple(names) if names is not None else None,
    )


def _is_alive(group: object) -> bool:
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:
        return group is not None and dist.is_initialized()
    return c10d.is_registered_group(group)


def patches() -> list[Patch]:
    """Remember what is made, and answer traced calls from that memory."""
    return [
        MEMORY,
        *dynamo_meshes.on_group_creation(MEMORY.on_group),
        *dynamo_meshes.on_mesh_creation(MEMORY.on_mesh),
        *dynamo_trackers.on_function(dist.new_group, _answer(dist.new_group, MEMORY.group)),
        *dynamo_trackers.on_function(
            init_device_mesh, _answer(init_device_mesh, _equal_mesh, _MESH)
        ),
        *dynamo_trackers.on_construction(
            DeviceMesh, _answer(DeviceMesh, _equal_constructed, _MESH)
        ),
        *dynamo_trackers.on_function(DeviceMesh._concatenate, _answer_concatenate),
    ]


def _answer(
    function: Callable[..., Any],
    find: Callable[[Mapping[str, object]], object],
    known: tuple[str, ...] | None = None,
) -> Any:
    """Return a function that answers a traced call of ``function``, as ``find`` knows it from the
    arguments.

    With ``known`` nothing is found for a call that gives any other argument than by default.
    """
    signature = inspect.signature(function)
    defaults = {name: each.default for name, each in signature.parameters.items()}

    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        values = dynamo_building.constants(args, kwargs)
        found = None
        if values is not None:
            bound = signature.bind(*values[0], **values[1])
            others = bound.arguments.keys() - {*(known or defaults)}
            bound.apply_defaults()
            if all(bound.arguments[name] == defaults[name] for name in others):
                found = find(bound.arguments)
        return found_or_break(tx, found, function.__name__)

    return answer


def found_or_break(tx: InstructionTranslatorBase, found: Any, name: str) -> object:
    """The tracker of a remembered group or mesh; without one a break, whose fix is code."""
    if found is None:
        dynamo_building.graph_break(
            BREAK,
            name,
            WHY,
            f"Create it above the compiled function, on all ranks, and use it inside: "
            f"`made = {name}(...)`.",
        )
    if found is dist.GroupMember.NON_GROUP_MEMBER:
        return dynamo_building.build(tx, found)
    tracker = dynamo_building.build_by_weakref(tx, found)
    groups = found.get_all_groups() if isinstance(found, DeviceMesh) else [found]
    names = {group.group_name: group for group in groups}
    dynamo_guards.guard(
        tracker, functools.partial(dynamo_guards.VALUE_MATCH, what="life", read=_lives(names))
    )
    return tracker


def _lives(groups: Mapping[str, Any]) -> Callable[[object], bool]:
    return lambda _: all(c10d.is_registered_group(group) for group in groups.values())


def _equal_mesh(arguments: Mapping[str, Any]) -> DeviceMesh | None:
    shape = torch.Size(arguments["mesh_shape"])
    ranks = torch.arange(shape.numel()).view(shape)
    return MEMORY.mesh(arguments["device_type"], ranks, arguments["mesh_dim_names"])


def _equal_constructed(arguments: Mapping[str, Any]) -> DeviceMesh | None:
    try:
        ranks = torch.tensor(arguments["mesh"], dtype=torch.int)
    except (TypeError, ValueError, RuntimeError):
        return None
    return MEMORY.mesh(arguments["device_type"], ranks, arguments["mesh_dim_names"])


def flattened(
    mesh: DeviceMesh, name: str | None = None, backend_override: object = None
) -> DeviceMesh | None:
    """Return the mesh that ``mesh._flatten(name)`` gives where nothing needs to be made, or
    None.
    """
    names = tuple(mesh.mesh_dim_names or ())
    name = name or "_".join(names)
    if mesh.ndim == 1 and name in names:
        return mesh
    if backend_override is not None:
        return None
    ranks = mesh.mesh.flatten()
    own = mesh._get_root_mesh()._flatten_mapping.get(name)
    if own is not None and torch.equal(own.mesh, ranks):
        return own
    return MEMORY.mesh(mesh.device_type, ranks, (name,))


def _answer_concatenate(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    """``DeviceMesh._concatenate(meshes)`` needs no new group: it is called now, once for these
    groups.
    """
    meshes = [
        dynamo_building.python_object(item)
        for item in dynamo_building.items_of(tx, [*args, *kwargs.values()][0])
    ]
    try:
        with dynamo_meshes.no_modes():
            made = DeviceMesh._concatenate(meshes)
    except RuntimeError as error:
        dynamo_building.raise_in_program(tx, error)
    # With the default group of its time: after another start, names stand for other groups.
    names = tuple(group.group_name for group in made.get_all_groups())
    key = dist.group.WORLD, names, made.mesh_dim_names
    return found_or_break(tx, MEMORY.concatenated.setdefault(key, made), "DeviceMesh._concatenate")


def unflattened(
    mesh: DeviceMesh, dim: int | str, sizes: tuple[int, ...], names: tuple[str, ...]
) -> DeviceMesh | None:
    """The remembered mesh that is equal to ``mesh._unflatten(dim, sizes, names)``, or None."""
    old = tuple(mesh.mesh_dim_names or ())
    at = old.index(dim) if isinstance(dim, str) else dim
    shape = (*mesh.mesh.shape[:at], *sizes, *mesh.mesh.shape[at + 1 :])
    new = (*old[:at], *names, *old[at + 1 :])
    return MEMORY.mesh(mesh.device_type, mesh.mesh.reshape(shape), new)
