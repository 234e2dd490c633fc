"""Try an edit on a copy of a graph, and then put the copy in the graph's place, or drop it."""

from __future__ import annotations

import copy

from torch import fx


class TrialCopy:
    """Hold a copy of a graph, ``graph``, that may be edited; the original stays as it is until
    ``commit``.

    ``in_module``: the copy has a module of its own, with what the original's holds for it. A pass
    that adds a constant or a subgraph then adds it there, and a trial that is dropped leaves
    nothing behind. Without it the copy has no module: it is for an edit that is only priced.
    """

    def __init__(self, graph: fx.Graph, *, in_module: bool = False) -> None:
        self._original, self.graph = graph, copy.deepcopy(graph)
        if in_module:
            fx.GraphModule(graph.owning_module or {}, self.graph)  # the graph keeps it

    def twins(self) -> dict[fx.Node, fx.Node]:
        """Return the copy of each node, while neither graph was edited."""
        return dict(zip(self._original.nodes, self.graph.nodes, strict=True))

    def commit(self) -> None:
        """Let the original hold the nodes of the copy, by the names that they have there."""
        graph, owner, module = (
            self._original,
            self._original.owning_module,
            self.graph.owning_module,
        )
        for node in self.graph.nodes if owner is not None else ():
            name = str(node.target).partition(".")[0]
            if node.op == "get_attr" and not hasattr(owner, name):
                setattr(owner, name, getattr(module, name))
        for node in reversed(list(graph.nodes)):
            graph.erase_node(node)
        # Names of the erased nodes are free again: a committed node is called as it was in the
        # trial, which the records of its passes say.
        graph._graph_namespace = fx.graph._Namespace()
        copied: dict[fx.Node, fx.Node] = {}
        result = graph.graph_copy(self.graph, copied)
        last = self.graph.output_node()
        copied[last] = graph.output(result)
        copied[last].meta = dict(last.meta)
