"""The name of a graph: a digest of its nodes, the same for every process that traces the same program."""

from __future__ import annotations

import hashlib

import torch
from torch import fx
from torch.utils import _pytree as pytree


def digest_of_graph(graph: fx.Graph) -> str:
    """Hash names, operators, inputs, sizes and types of all nodes; numbers among the arguments are left out.

    They hold where in a mesh this rank stands. Symbolic sizes count by their names.
    """
    digest = hashlib.sha256()
    for node in graph.nodes:
        inputs = " ".join(source.name for source in node.all_input_nodes)
        digest.update(f"{node.name} {operator_of(node)} {inputs} {value_of(node)}\n".encode())
    return digest.hexdigest()[:24]


def operator_of(node: fx.Node) -> str:
    """The operator that a node calls, such as ``aten.mm.default``; what else a node is, in a word."""
    return str(node.target) if node.op == "call_function" else node.op


def value_of(node: fx.Node) -> str:
    """Sizes and types of a node's value."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return " ".join(
        f"{tuple(leaf.shape)} {leaf.dtype}"
        if isinstance(leaf, torch.Tensor)
        else type(leaf).__name__
        for leaf in leaves
    )
