"""The plugin with a fault in how it lowers ``all_reduce``, to show that the checks of launches see it: PLANTED names the fault."""
import os

import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist.tracing import collectives, c10d
from dynamo_dist.tracing.functional import member
from dynamo_dist.tracing.work import copy_back, end, payload, plain

LIBRARY = torch.library.Library("planted", "FRAGMENT")
LIBRARY.define("add_up(Tensor input, str group_name) -> Tensor")


@torch.library.impl("planted::add_up", "CompositeExplicitAutograd", lib=LIBRARY)
def add_up(tensor, group_name):
    result = tensor.clone()
    dist.all_reduce(result, group=dist.distributed_c10d._resolve_process_group(group_name))
    return result


@torch.library.register_fake("planted::add_up", lib=LIBRARY)
def add_up_fake(tensor, group_name):
    return torch.empty_like(tensor)


def drop(tensor, op="sum", group=None, async_op=False):
    return end(copy_back, [payload(tensor).clone()], [tensor], async_op)


def double(tensor, op="sum", group=None, async_op=False):
    once = torch.ops._c10d_functional.wait_tensor(collectives.start_all_reduce(payload(tensor), op, member(group).group_name))
    return end(copy_back, [collectives.start_all_reduce(once, op, member(group).group_name)], [tensor], async_op)


def other_group(tensor, op="sum", group=None, async_op=False):
    return collectives.all_reduce(tensor, op, None, async_op)


def other_op(tensor, op="sum", group=None, async_op=False):
    return collectives.all_reduce(tensor, "max", group, async_op)


def half(tensor, op="sum", group=None, async_op=False):
    launched = collectives.start_all_reduce(payload(tensor).to(torch.float16), op, member(group).group_name)
    return end(copy_back, [launched], [tensor], async_op)


def part(tensor, op="sum", group=None, async_op=False):
    return collectives.all_reduce(tensor[:1], op, group, async_op)


def unwaited(tensor, op="sum", group=None, async_op=False):
    plain(tensor).copy_(collectives.start_all_reduce(payload(tensor), op, member(group).group_name))


def hidden(tensor, op="sum", group=None, async_op=False):
    plain(tensor).copy_(torch.ops.planted.add_up(payload(tensor), member(group).group_name))


def enable():
    c10d.C10D["all_reduce"] = globals()[os.environ["PLANTED"]]
    dynamo_dist.enable()
