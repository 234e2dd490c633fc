"""One process of test_plugin.py: what this installation makes of the plugins it finds, as JSON."""

import dataclasses
import json
import sys

import torch
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import dynamo_dist
import inductor_passes
from dynamo_dist.cli.doctor import diagnose
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group


def program(x, local):
    from example_plugin.tracing import mean_over_ranks

    y = torch.ops.example_plugin.scale(x, 2.0)
    return y.to_local().sum() + mean_over_ranks(local).sum()


def compiled(options):
    torch.compiler.reset()
    with fake_group(4), recorder.records_of_block() as records:
        mesh = init_device_mesh("cpu", (4,))
        x = DTensor.from_local(torch.ones(4, 8), mesh, [Shard(0)], run_check=False)
        local = torch.full((8,), 4.0)
        step = torch.compile(program, backend="dynamo_dist", fullgraph=True, options=options)
        # A fake group's sum over four ranks is this rank's share alone.
        assert step(x, local).item() == 2 * 32 + 8.0
    return [
        {
            "topology": record.topology,
            "launches": [c.kind for c in record.collectives],
            "passes": {p.name: p.counters for p in record.passes},
        }
        for record in records
    ]


dynamo_dist.enable()
after = inductor_passes.options()["post_grad_custom_post_pass"]
found = {
    "passes": list(inductor_passes.registered_passes()),
    "uuid": after.uuid(),
    "tag": torch.compiler.config.cache_key_tag,
    "degraded": [dataclasses.asdict(problem) for problem in diagnose().degraded],
    "strategy": "example_plugin.tracing" in sys.modules
    and torch.ops.example_plugin.scale.default
    in DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs,
}
if "compile" in sys.argv:
    found["named"] = compiled({"topology": "example-cluster"})
    found["off"] = compiled({"topology": "example-cluster", "disable": ["count_waits"]})
print(json.dumps(found))
