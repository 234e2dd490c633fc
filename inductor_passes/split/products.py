"""Collective products: a product and the launch that it waits for, or that waits for it, as regions of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from inductor_passes.graph.collectives import group_size, is_wait, kind, launches, payload_bytes
from inductor_passes.graph.edit import CAST, PLACING, aten, tensor
from inductor_passes.graph.numbers import CHUNKS, MEMBERS, PART
from inductor_passes.split.region import Positions, Region, spread
from inductor_passes.split.rules.places import Cut, fits

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)


@dataclass(frozen=True, slots=True)
class CollectiveProduct:
    """``launch`` and the nodes between it and its ``products``, both among ``nodes``. ``seeds``: what may be read in chunks."""

    launch: fx.Node
    products: tuple[fx.Node, ...]
    nodes: frozenset[fx.Node]
    seeds: tuple[tuple[fx.Node, Cut], ...]

    @property
    def alike(self) -> tuple[object, ...]:
        """Equal for collective products that are chunked alike: of the layers of a model, all."""
        shapes = [[tuple(t.shape) for n in p.all_input_nodes if (t := tensor(n)) is not None] for p in self.products]  # fmt: skip
        cuts = tuple(cut for _, cut in self.seeds)
        return kind(self.launch), payload_bytes(self.launch), str(shapes), cuts

    def region(self, parts: int, cut: Cut) -> Region | None:
        """Return the region in chunks along ``cut``, if the launch and a product can be computed so."""
        seed = next(node for node, its in self.seeds if its == cut)
        value = tensor(seed)
        if value is None or not all(isinstance(size, int) for size in value.shape):
            return None
        if not fits(cut, tuple(value.shape), parts):
            return None
        found = spread(
            Positions(self.launch.graph), seed, cut, parts, (self.launch,), within=self.nodes
        )
        found.of = CHUNKS
        whole = any(product in found.steps for product in self.products)
        return found if whole and self.launch in found.steps else None


def collective_products(graph: fx.Graph) -> Iterator[CollectiveProduct]:
    """Yield ``all_gather -> product``, ``product -> reduce_scatter`` and ``product -> all_reduce`` of launches that are no parts."""
    for launch in launches(graph):
        if PART in launch.meta or len(launch.meta.get(MEMBERS, ())) > 1:
            continue
        source = launch.args[0] if launch.args else None
        if not isinstance(source, fx.Node) or tensor(source) is None:
            continue
        if kind(launch) == "all_gather":
            found = _gathered(launch, source)
        elif kind(launch) in ("reduce_scatter", "all_reduce"):
            found = _reduced(launch, source)
        else:
            found = None
        if found is not None:
            yield found


def _gathered(launch: fx.Node, source: fx.Node) -> CollectiveProduct | None:
    nodes, products = {launch}, []
    front = list(launch.users)
    while front:
        node = front.pop()
        if node in nodes:
            continue
        if node.target in PRODUCTS:
            products.append(node)
            nodes.add(node)
        elif is_wait(node) or _keeps_elements(node):
            nodes.add(node)
            front.extend(node.users)
    value = tensor(source)
    if not products or value is None:
        return None
    seeds = tuple((source, Cut(dim)) for dim in range(value.dim()))
    return CollectiveProduct(launch, tuple(products), frozenset(nodes), seeds)


def _reduced(launch: fx.Node, source: fx.Node) -> CollectiveProduct | None:
    nodes = {launch, *(user for user in launch.users if is_wait(user))}
    node = source
    while _keeps_elements(node) and isinstance(node.args[0], fx.Node):
        nodes.add(node)
        node = node.args[0]
    if node.target not in PRODUCTS:
        return None
    nodes.add(node)
    a, b = node.args[-2:]
    rank = len(node.meta["val"].shape)
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    # A scatter of rows gives each rank a piece of every chunk.
    blocks = group_size(launch) if kind(launch) == "reduce_scatter" else 1
    seeds = ((a, Cut(rank - 2, max(blocks, 1))), (b, Cut(rank - 1)))
    return CollectiveProduct(launch, (node,), frozenset(nodes), seeds if a is not b else seeds[:1])


def _keeps_elements(node: fx.Node) -> bool:
    return node.op == "call_function" and (node.target in PLACING or node.target is CAST)
