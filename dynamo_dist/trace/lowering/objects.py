"""Object collectives: why they cannot be traced, and what to write instead."""

from __future__ import annotations

from typing import Any

from dynamo_dist.torch_compat import dynamo_building

# The function -> what to write instead.
FIXES = {
    "all_gather_object": "sizes = torch.empty(group.size(), dtype=torch.int64)\n"
    "    dist.all_gather_into_tensor(sizes, torch.tensor([n]))",
    "gather_object": "dist.gather(torch.tensor([n]), gather_list, dst=0)",
    "broadcast_object_list": "n = torch.tensor([n])\n    dist.broadcast(n, src=0)",
    "scatter_object_list": "n = torch.empty(1, dtype=torch.int64)\n"
    "    dist.scatter(n, [torch.tensor([i]) for i in values] if rank == 0 else None, src=0)",
    "send_object_list": "dist.send(torch.tensor([n]), dst)",
    "recv_object_list": "n = torch.empty(1, dtype=torch.int64)\n    dist.recv(n, src)",
}


def refuse(name: str) -> Any:
    """An answer to calls of ``name``: break the graph."""

    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        dynamo_building.graph_break(
            "Collective on Python objects",
            f"torch.distributed.{name}",
            f"{name} pickles objects and gives new ones on every call: they decide what the program does "
            "next, so a graph that holds one call's objects would be wrong for the next.",
            "Call it before the compiled function and pass the objects in, or send tensors:\n"
            f"    {FIXES[name]}",
        )

    return answer
