"""Frames as they are compiled in one process and loaded in another, both of which are this one."""

import torch

from dynamo_dist.saved import frames


def backend(gm, inputs):
    with frames.of_graph(gm):
        return gm.forward


def call(function, *args, **options):
    """``function`` compiled, as in a process that has compiled nothing."""
    torch._dynamo.reset()
    return torch.compile(function, backend=backend, **options)(*args)


def load():
    """All frames so far, as another process finds them."""
    kept = frames.kept()
    frames._kept.clear()
    frames._loaded.clear()
    frames.take("the folder", [each.dumps() for each in kept])
    return kept
