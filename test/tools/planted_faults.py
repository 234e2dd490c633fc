"""Faults for the fuzzer to find, one in each part; ``fuzz.py --plant planted_faults:<name>``."""

import torch
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy


def tracker():
    """A traced all_reduce takes the largest value in place of the sum."""
    from dynamo_dist.tracing import c10d, collectives

    def all_reduce(tensor, op="sum", group=None, async_op=False):
        return collectives.all_reduce(tensor, "max", group, async_op)

    c10d.C10D["all_reduce"] = all_reduce


def strategy():
    """Softmax along a sharded dimension is computed on each shard by itself."""
    from dynamo_dist.sharding import register_strategy

    @register_strategy(torch.ops.aten._softmax.default)
    def shard_by_shard(schema):
        layouts = [spec.output_spec for spec in schema.args_schema[0].strategies]
        return OpStrategy(
            [OpSpec(at, input_specs=[at], redistribute_cost=[[0.0]]) for at in layouts]
        )


def rewrite():
    """Merged launches are handed out in the wrong order."""
    from inductor_passes.rewrite import merge_tiny

    upstream = merge_tiny.merge

    def merge(graph, bucket, name):
        upstream(graph, bucket, name)
        pieces = [
            n for n in graph.nodes if n.op == "call_function" and n.name.startswith("getitem")
        ]
        pieces[-1].args, pieces[-2].args = pieces[-2].args, pieces[-1].args

    merge_tiny.merge = merge


def scheduler():
    """The order of writes is lost."""
    from inductor_passes.graph import dependencies

    dependencies._Memory.of = lambda self, i: set()
