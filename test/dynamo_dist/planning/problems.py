"""Small programs of the planner's own words, for tests that need no torch."""

from dynamo_dist.program import MeshInfo, Program, Ref, Source, Step, Value

LINE = MeshInfo((4,), ((0, 1, 2, 3),), 4)
SQUARE = MeshInfo((2, 4), ((0, 4), (0, 1, 2, 3)), 8)
X = Value((64, 64), "float32", 4)


class Prices:
    """A microsecond per KiB of payload and 10 for a start; compute is free."""

    def collective_us(self, kind, payload_bytes, ranks):
        factor = {"all_gather": len(ranks) - 1, "all_reduce": 2}.get(kind, 1)
        return 10 + factor * payload_bytes / 1024

    def product_us(self, dtype, shape, moved_bytes):
        return 0.0

    def kernel_us(self, moved_bytes, operations=0.0, dtype="float32", **how):
        return 0.0

    def memory_us(self, moved_bytes):
        return 0.0

    def digest(self):
        return "test"


def op(text, inputs, upstream, output, **more):
    """A step of one output; ``upstream`` are the specs of its inputs."""
    specs = tuple((word,) for word in upstream)
    return Step("op", text, inputs, (X,), specs, ((output,),), 0, **more)


def chain(length, upstream="R", source="S0"):
    """A source, ``length`` pointwise steps that upstream runs on ``upstream``, and an output
    pinned to S0.
    """
    steps = [op("aten.sin.default(*)", (Ref(-1),), [upstream], upstream)]
    steps += [op("aten.sin.default(*)", (Ref(i),), [upstream], upstream) for i in range(length - 1)]
    pin = Step(
        "redistribute", "redistribute", (Ref(length - 1),), (X,), (("S0",),), (("S0",),), 0, True
    )
    return Program([*steps, pin], [Source(X, (source,), True)], [LINE])
