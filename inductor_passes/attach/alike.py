"""Graphs written alike on all ranks, so that ranks whose graphs are the same have one entry in Inductor's cache.

Each rank traces for itself: what it read of its rank, coordinate or environment is a number in its graph, and another
number is another graph, with a key of its own. What is left to differ is names of groups, which become names that all
ranks have, and the rank in the key, which stays where something that compiles the graph may ask for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from inductor_passes import registry
from inductor_passes.kernels import availability
from inductor_passes.rewrite.all_reduce_slice import asks_for_position
from inductor_passes.torch_compat import c10d, config

# Code of users that Inductor calls while it compiles a graph.
_OF_USERS = (
    *("post_grad_custom_pre_pass", "post_grad_custom_post_pass"),
    *("_pre_fusion_custom_pass", "_post_fusion_custom_pass"),
)


def name_groups_alike(gm: fx.GraphModule) -> None:
    """Call each group of a graph, and of those inside it, by the name that all ranks have for it.

    Not where kernels with a collective inside may be put in: their memory is set up under the group's own name.
    """
    if c10d.default_group() is None or not availability.why_not_here():
        return
    for graph in graphs_inside(gm):
        for node in graph.nodes:
            _name_alike(node)


def is_rank_free(gm: fx.GraphModule, patches: Mapping[str, Any]) -> bool:
    """Return whether equal graphs compile to equal code on all ranks: nothing that compiles them asks for the rank.

    ``patches``: Inductor's options for this compile. Passes of others may ask for anything.
    """
    if any(
        pass_ not in registry.DEFAULT_PASSES for pass_ in map(_class, registry.ordered_passes())
    ):
        return False
    if any(_is_of_user(patches.get(key, config.get_config(key))) for key in _OF_USERS):
        return False
    return not any(asks_for_position(graph) for graph in graphs_inside(gm))


def _class(pass_: Any) -> type:
    return pass_ if isinstance(pass_, type) else type(pass_)


def _is_of_user(given: Any) -> bool:
    """Return whether an option is a pass that is not ours, or ours with one of a user's before it."""
    attachment = getattr(given, "attachment", None)
    if attachment is None:
        return given is not None
    return attachment.chain_pre is not None or attachment.chain_post is not None


def graphs_inside(gm: fx.GraphModule) -> Iterator[fx.Graph]:
    """A module's graph, and those inside it."""
    return (each.graph for each in gm.modules() if isinstance(each, fx.GraphModule))


def _name_alike(node: fx.Node) -> None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    for at, argument in enumerate(node.target._schema.arguments):
        if argument.name != "group_name":
            continue
        if isinstance(name := node.kwargs.get(argument.name), str):
            node.update_kwarg(argument.name, c10d.common_name(name))
        elif at < len(node.args) and isinstance(name := node.args[at], str):
            node.update_arg(at, c10d.common_name(name))
