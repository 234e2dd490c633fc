"""Checks for launches that cannot run: an error while compiling, with the user's line, not a crash or a hang later."""

from __future__ import annotations

from torch import fx

from inductor_passes.errors import GroupError
from inductor_passes.graph.collectives import argument, group_name, input_tensors, kind, launches
from inductor_passes.graph.printing import user_line
from inductor_passes.torch_compat import c10d


def check_groups(graph: fx.Graph) -> None:
    """Every launch names a live process group that serves the device of its tensors.

    Raises GroupError. A group that is a graph input is known only when the graph runs: not checked.
    """
    for launch in launches(graph):
        if isinstance(argument(launch, "group_name"), fx.Node):
            continue
        name = group_name(launch)
        devices = c10d.group_device_types(name)
        if devices is None:
            raise GroupError(
                f"{kind(launch)} uses the process group {name!r}, which does not exist{_at(launch)}.",
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
