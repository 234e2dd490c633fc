"""Device meshes: the members that upstream leaves closed.

Upstream guards a mesh by its layout, ranks, device type and dimension names, and opens 34 members.
What is not among them ends in a hard error, even a missing attribute; here Python's own rules
apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.torch_compat import dynamo_building, dynamo_meshes, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import attributes, creation
from dynamo_dist.tracing.attributes import is_data, python_attribute

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase

# Methods that make groups unless an equal mesh exists.
_DERIVED: dict[str, Callable[..., DeviceMesh | None]] = {
    "_flatten": creation.flattened,
    "_unflatten": creation.unflattened,
}


# Members that look for a dimension, and raise in eager mode where there is none.
_LOOKUPS = ("__getitem__", "size", "get_group", "get_local_rank", "_get_mesh_dim_by_name")
# Members whose value is another one on each rank.
_OF_THE_RANK = ("get_rank", "get_local_rank", "get_coordinate", "_sym_get_coordinate")


class DeviceMeshVariable(dynamo_trackers.MeshTracker):
    """A device mesh. The members that upstream opened stay as upstream traces them."""

    def attribute(self, tx: object, name: str) -> Any:
        if name in _OF_THE_RANK:
            dynamo_building.note_rank_dependent()
        if name in ("get_all_groups", *_DERIVED):
            return attributes.bound_method(self, tx, name)
        if not dynamo_building.is_upstreams_member(self, name):
            found = python_attribute(self, tx, name)
            return attributes.refuse(self.real, name) if found is None else found
        if is_data(self.real, name):
            source = dynamo_building.attribute_source(self, name)
            return dynamo_building.build(tx, getattr(self.real, name), source)
        if self.source is not None and dynamo_building.is_inlined_member(self.real, name):
            return python_attribute(self, tx, name)
        return None

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in _OF_THE_RANK:
            dynamo_building.note_rank_dependent()
        if name == "get_all_groups" and not args and not kwargs:
            dims = [dynamo_building.build(tx, dim) for dim in range(self.real.ndim)]
            return dynamo_building.build_list(
                tx, [self.call_method(tx, "get_group", [d], {}) for d in dims]
            )
        if name in _LOOKUPS and (values := dynamo_building.constants(args, kwargs)) is not None:
            try:
                getattr(self.real, name)(*values[0], **values[1])
            except (LookupError, RuntimeError) as error:
                dynamo_building.raise_in_program(tx, error)
        if name in _DERIVED and (values := dynamo_building.constants(args, kwargs)) is not None:
            found = _DERIVED[name](self.real, *values[0], **values[1])
            return (
                self if found is self.real else creation.found_or_break(tx, found, f"mesh.{name}")
            )
        if dynamo_building.is_upstreams_member(self, name):
            return None
        return self.attribute(tx, name).call_function(tx, args, kwargs)

    def has_attribute(self, tx: InstructionTranslatorBase, name: str) -> bool | None:
        return attributes.has_attribute(self.real, name)

    def text(self, tx: InstructionTranslatorBase, name: str) -> object:
        # Made of what upstream's guard of a mesh compares: layout, ranks, device type, names.
        return dynamo_building.build(tx, repr(self.real))


def patches() -> list[Patch]:
    """List the patches that enabling makes for meshes besides tracking them."""
    return dynamo_meshes.derive_by_overload(DeviceMesh)
