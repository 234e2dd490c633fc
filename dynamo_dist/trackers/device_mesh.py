"""Device meshes: the members that stock leaves closed.

Stock guards a mesh by its layout, ranks, device type and dimension names, and opens 34 members. What
is not among them ends in a hard error, even a missing attribute; here Python's own rules apply.
"""

from __future__ import annotations

from typing import Any

from dynamo_dist import _torch
from dynamo_dist.trackers.attributes import is_data, python_attribute


class DeviceMeshVariable(_torch.MeshTracker):
    """A device mesh. The members that stock opened stay as stock traces them."""

    def attribute(self, tx: Any, name: str) -> Any:
        if not _torch.is_open_member(self.real, name):
            return python_attribute(self, tx, name)
        if is_data(self.real, name):
            source = _torch.attribute_source(self, name)
            return _torch.build(tx, getattr(self.real, name), source)
        if self.source is not None and _torch.is_inlined_member(self.real, name):
            return python_attribute(self, tx, name)
        return None

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if _torch.is_open_member(self.real, name) or not hasattr(self.real, name):
            return None
        found = python_attribute(self, tx, name)
        return None if found is None else found.call_function(tx, args, kwargs)

    def has_attribute(self, tx: Any, name: str) -> bool:
        return hasattr(self.real, name)

    def text(self, tx: Any, name: str) -> Any:
        # Made of what stock's guard of a mesh compares: layout, ranks, device type, names.
        return _torch.build(tx, repr(self.real))
