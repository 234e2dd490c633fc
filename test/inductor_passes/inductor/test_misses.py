"""Each graph says which cache it came from, or what of its key has changed since it was compiled
last.
"""

import logging

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.distributed import _functional_collectives as funcol

import inductor_passes as ip
from inductor_passes.inductor import cache_keys
from inductor_passes.inductor.hooks import Attachment
from inductor_passes.inductor.session import compile_with_passes
from inductor_passes.records import CacheRecord, GraphRecord
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group, trace
from inductor_passes.torch_compat import caches

pytestmark = pytest.mark.usefixtures("without_kernels")


def step(x):
    return funcol.all_reduce(x @ x, "sum", dist.group.WORLD) @ x


def looked_up(rows=8, **options):
    """Compile as a new process does, but for the fresh cache folder that all compiles of a test
    share.
    """
    torch._dynamo.reset()
    with fake_group(4), torch.no_grad(), recorder.records_of_block() as records:
        torch.compile(step, backend=compile_with_passes, options=options, dynamic=False)(
            torch.ones(rows, rows)
        )
    (record,) = records
    return str(record.cache)


def test_cache_misses_then_hits_and_misses_by_another_option(caplog):
    with caplog.at_level(logging.INFO):
        assert looked_up() == "miss: first time"
        assert looked_up() == "hit: AOTAutograd's cache"
        assert looked_up(exact=True) == "miss: option exact"
    told = [m for m in caplog.messages if ": cache " in m]
    assert told == [
        "0/0:inference: cache miss: first time",
        "0/0:inference: cache hit: AOTAutograd's cache",
        "0/0:inference: cache miss: option exact",
    ]


def test_inductors_own_cache_is_told_from_autograds():
    with functorch_config.patch(enable_autograd_cache=False):
        assert looked_up() == "miss: first time"
        assert looked_up() == "hit: Inductor's cache"


def test_every_part_that_changed_is_named():
    looked_up()
    found = looked_up(rows=16, disable=["merge_tiny"], max_autotune=True)
    assert found == "miss: graph, inputs, option disable, torch._inductor.config.max_autotune"


def test_where_no_cache_is_asked_it_says_so():
    assert looked_up(fx_graph_cache=False) == "off: Inductor's cache is off"


def test_a_pass_without_uuid_is_named():
    key = Attachment(ip.PassOptions(), chain_post=lambda graph: None).key()
    with fake_group(4):
        graph = trace(step, [4, 4])
        found = cache_keys.why_missed(graph, key, "inference")
    assert found == CacheRecord("off", ("post_grad_custom_post_pass has no uuid()",))


def test_a_plugin_that_came_and_another_torch_are_named(monkeypatch):
    def missed():
        with fake_group(4):
            graph = trace(step, [4, 4])
            return cache_keys.why_missed(graph, Attachment(ip.PassOptions()).key(), "inference").why

    class Nothing(ip.GraphPass):
        name = "nothing"

        def run(self, graph):
            return ip.PassStats(False)

    assert missed() == (cache_keys.FIRST,)
    assert missed() == (cache_keys.UNKNOWN,)
    ip.register(Nothing)
    try:
        assert missed() == ("pass nothing",)
    finally:
        ip.unregister(Nothing)
    monkeypatch.setattr(caches, "torch_version", lambda: "3.0")
    assert missed() == ("pass nothing", "torch")


def test_it_survives_json_and_an_old_record_has_none(graph):
    record = graph(cache=CacheRecord("miss", ("graph",)))
    data = record.to_json()
    assert GraphRecord.from_json(data) == record
    del data["cache"]
    assert GraphRecord.from_json(data).cache is None
