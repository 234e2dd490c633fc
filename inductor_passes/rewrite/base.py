"""Define the base of the rewrites: they need a functional graph and keep node values true."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.errors import InvariantError
from inductor_passes.graph.edit import computed
from inductor_passes.graph.invariants import check_functional
from inductor_passes.graph_pass import GraphPass

_NAMESPACES = ("aten", "prims", "_c10d_functional")


class Rewrite(GraphPass):
    """Fewer or smaller collectives, same meaning.

    Requires: a functional graph.
    Ensures:  shape and dtype of every new node, and of what reads one, are what its op makes of its
              inputs; launches that stay keep their order; a second run changes nothing.
    """

    changes_launches = True

    def requires(self, graph: fx.Graph) -> None:
        check_functional(graph, self.name)

    def ensures(self, before: Sequence[fx.Node], graph: fx.Graph) -> None:
        known = set(before)
        for node in graph.nodes:
            touched = node not in known or any(n not in known for n in node.all_input_nodes)
            if touched and getattr(node.target, "namespace", "") in _NAMESPACES:
                self._check(node)

    def _check(self, node: fx.Node) -> None:
        said, true = node.meta.get("val"), computed(node)
        if not isinstance(said, torch.Tensor):
            return
        if said.dtype != true.dtype or said.shape != true.shape:
            raise InvariantError(
                f"The pass {self.name} left %{node.name} with {said.dtype} {list(said.shape)}, "
                f"but its op makes {true.dtype} {list(true.shape)} of its inputs.",
                "",
                f"Leave it out with options={{'disable': ['{self.name}']}}.",
            )
