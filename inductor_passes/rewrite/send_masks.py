"""Gather and broadcast masks as the bytes that they are.

Inductor promotes the tensor of a collective with the numbers beside it, the size of the group or
the rank that sends. So bools become int64: eight bytes are sent for one, and on CPUs ``where``
refuses what comes back with an AssertionError (seen in 2.13 and 2.14).
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.graph.collectives import is_wait
from inductor_passes.graph.edit import CAST, computed, emit

_c10d = torch.ops._c10d_functional
_WITH_NUMBERS = (_c10d.all_gather_into_tensor.default, _c10d.broadcast.default)


def send_masks_as_bytes(graph: fx.Graph) -> int:
    """Cast bools that are gathered or broadcast to uint8, and back behind the wait. Return how many
    launches were changed. It changes no number.
    """
    changed = 0
    for target in _WITH_NUMBERS:
        for launch in graph.find_nodes(op="call_function", target=target):
            mask, *rest = launch.args
            if mask.meta["val"].dtype != torch.bool or not all(map(is_wait, launch.users)):
                continue
            with graph.inserting_before(launch):
                sent = emit(graph, CAST, (mask, torch.uint8), mask)
            launch.args = (sent, *rest)
            launch.meta["val"] = computed(launch)
            for wait in launch.users:
                wait.meta["val"] = computed(wait)
                with graph.inserting_after(wait):
                    back = emit(graph, CAST, (wait, torch.bool), wait)
                wait.replace_all_uses_with(back, lambda user, back=back: user is not back)
            changed += 1
    return changed
