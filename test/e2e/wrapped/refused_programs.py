"""What cannot be in a graph, or is wrong: said with why and fix, before any launch; without
``fullgraph`` as in eager mode.
"""

import contextlib
import logging

import pytest
import torch
from beside_eager import Launches, batch, program, sgd, train_with_breaks, weights
from fsdp2_programs import sharded
from nets import Net
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.tracing import fsdp2


def refused(model, *said, around=False):
    """``fullgraph=True`` says all this and launches nothing, unless hooks of the root run
    ``around`` its graph.
    """
    torch._dynamo.reset()  # a forward given up without ``fullgraph`` is not tried again
    function = torch.compile(model, backend="dynamo_dist", fullgraph=True)
    with Launches() as launches, pytest.raises(Exception) as error:
        function(batch(0)).sum().backward()
    text = " ".join(str(error.value).split())
    for each in said:
        assert each in text, text
    assert around or not launches.counts, launches.counts


@program(2)
def compression_hook():
    def wrap(model):
        model = DistributedDataParallel(model)
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    refused(
        wrap(Net()),
        "no counterpart of its communication hook",
        "DistributedDataParallel(torch.compile",
    )
    train_with_breaks(wrap, Net(), 3)


@program(2)
def join():
    model = DistributedDataParallel(Net())
    with contextlib.suppress(InterruptedError), model.join():
        refused(model, "no counterpart of its join()")
        raise InterruptedError  # leaves without waiting for peers


@program(2)
def static_graph_before_its_first_step():
    model = DistributedDataParallel(Net(), static_graph=True)
    refused(model, "static_graph, whose first iteration its reducer has to see")


@program(2)
def offloaded():
    wrap = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    refused(wrap(Net()), "no counterpart of its CPUOffloadPolicy", "block.compile()", around=True)


@program(2)
def communication_of_its_own():
    class AllGather(DefaultAllGather):
        pass

    def wrap(model):
        model = sharded()(model)
        model.set_custom_all_gather(AllGather())
        return model

    refused(wrap(Net()), "no counterpart of its custom communication (AllGather)", around=True)
    train_with_breaks(wrap, Net(), 3)


@program(2)
def a_hook_of_reductions():
    model = sharded()(Net())
    model.set_all_reduce_hook(lambda grad: None)
    refused(model, "no counterpart of its set_all_reduce_hook", around=True)


@program(2)
def parameters_on_meta():
    with torch.device("meta"):
        model = Net()
    refused(sharded()(model), "meta")


@program(2)
def a_loss_that_is_no_scalar():
    function = torch.compile(sharded()(Net()), backend="dynamo_dist", fullgraph=True)
    out = function(batch(0))
    with Launches() as launches, pytest.raises(RuntimeError, match="scalar outputs"):
        out.backward()
    assert not launches.counts


@program(2)
def an_optimizer_made_before_sharding():
    """As in eager mode it holds parameters that nobody trains; the first compiled forward warns
    of it, before any launch.
    """
    model = Net()
    optimizer = sgd(model.parameters())
    model = sharded()(model)
    before = weights(model)
    function = torch.compile(model, backend="dynamo_dist", fullgraph=True)
    launched = []  # when it was said
    handler = logging.Handler()
    handler.emit = lambda record: launched.append(launches.counts.total())
    log = logging.getLogger(fsdp2.__name__)
    log.addHandler(handler)
    with Launches() as launches:
        function(batch(0)).square().mean().backward()
    log.removeHandler(handler)
    assert launched == [0] and launches.counts
    optimizer.step()
    torch.testing.assert_close(weights(model), before)


@program(2)
def moved_after_sharding():
    refused(sharded()(Net()).to("meta"), "meta")
