"""Which trackers are on, and that each can be left to upstream."""

import pytest
import torch

from dynamo_dist.settings import TRACKER_NAMES, DistConfig
from dynamo_dist.tracing import trackers


def test_the_registry_and_the_config_name_the_same_trackers():
    assert tuple(entry.name for entry in trackers.TRACKERS) == TRACKER_NAMES


def test_changes_are_listed_not_made(torch_tables):
    torch_tables.settle()
    before = torch_tables.snapshot()
    assert trackers.patches(DistConfig())
    assert torch_tables.difference(before, torch_tables.snapshot()) == []


def test_nothing_changes_without_trackers():
    assert trackers.patches(DistConfig(frozenset(TRACKER_NAMES))) == []


@pytest.mark.parametrize("off", TRACKER_NAMES)
def test_one_tracker_off(monkeypatch, mesh, compiled, off):
    from torch.distributed.tensor import Shard

    import dynamo_dist

    asks = {
        "process_group": (lambda x, o: (x + 1, o.name()), mesh.get_group(0)),
        "device_mesh": (lambda x, o: (x + 1, [g.size() for g in o.get_all_groups()]), mesh),
        "placement": (lambda x, o: (x + 1, hasattr(type(o), "nope"), repr(o)), Shard(0)),
    }
    monkeypatch.setenv("DYNAMO_DIST_TRACKERS_OFF", off)
    with dynamo_dist.enabled():
        for name, (ask, value) in asks.items():
            if name != off:
                torch.compiler.reset()
                assert compiled(ask)[0](torch.zeros(1), value)[1:] == ask(torch.zeros(1), value)[1:]
