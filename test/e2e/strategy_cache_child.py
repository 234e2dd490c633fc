"""One process of test_strategy_caches.py: the same program under one set of strategies after
another.
"""

import json
import sys

import torch
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dynamo_dist
from dynamo_dist.sharding import register_strategy
from dynamo_dist.sharding.rows import strategy
from inductor_passes.testing import fake_group

SIN = torch.ops.aten.sin.default


def step(x):
    return x.logsumexp(1).sin()


def whole(schema):
    return strategy(lambda call: [])(schema)


def sharded(schema):
    return strategy(lambda call: [call.row([Shard(0)], self=Shard(0))])(schema)


STATES = {
    "upstream": dynamo_dist.disable,
    "enabled": dynamo_dist.enable,
    "registered": lambda: register_strategy(SIN)(whole),
    "registered again": lambda: register_strategy(SIN)(sharded),
    "disabled": dynamo_dist.disable,
}


def outcome(x):
    """Placements in eager and compiled, and hits of AOTAutograd's and of Inductor's cache."""
    torch._dynamo.reset()
    counters.clear()
    eager = step(x)
    compiled = torch.compile(step, backend="inductor", fullgraph=True)(x)
    assert torch.allclose(compiled.full_tensor(), eager.full_tensor())
    return {
        "eager": str(eager.placements),
        "compiled": str(compiled.placements),
        "aot": counters["aot_autograd"]["autograd_cache_hit"],
        "inductor": counters["inductor"]["fxgraph_cache_hit"],
    }


found = {}
with fake_group(4):
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.ones(2, 16), mesh, [Shard(0)], run_check=False)
    for name in sys.argv[1].split(","):
        STATES[name]()
        found[name] = outcome(x)
print(json.dumps(found))
