"""What programs do with an FSDP2 model between its steps."""

import copy
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accumulation_programs import resharding
from beside_eager import MIXED, adamw, plain, program, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict


@program(2)
def clipped():
    def step(side, x, i):
        side.optimizer.zero_grad()
        loss = side.call(x).square().mean()
        loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(side.model.parameters(), 0.1))
        side.optimizer.step()
        return loss + norm

    resharding().train(step, mixed=MIXED)


@program(2)
def state_taken_and_put_back():
    def step(side, x, i):
        if i == 4:
            side.kept = copy.deepcopy(side.model.state_dict())
            side.options = copy.deepcopy(side.optimizer.state_dict())
        if i == 9:
            side.model.load_state_dict(side.kept)
            side.optimizer.load_state_dict(side.options)
        return plain(side, x, i)

    resharding().train(step, optimizer=adamw)


@program(2)
def saved_and_loaded():
    def step(side, x, i):
        if i == 4:
            where = [tempfile.mkdtemp()]
            dist.broadcast_object_list(where)
            side.folder = where[0]
            dcp.save({"model": get_model_state_dict(side.model)}, checkpoint_id=side.folder)
        if i == 9:
            state = {"model": get_model_state_dict(side.model)}
            dcp.load(state, checkpoint_id=side.folder)
            set_model_state_dict(side.model, state["model"])
        return plain(side, x, i)

    resharding().train(step, mixed=(7,))


@program(2)
def gathered_and_freed_between():
    def step(side, x, i):
        if i % 3 == 0:
            side.model.unshard()
        if i % 3 == 1:
            side.model.unshard(async_op=True).wait()
            side.model.reshard()
        if i % 3 == 2:
            side.model.blocks[0].unshard(async_op=True)
        return plain(side, x, i)

    # In the counted step eager mode finds one group whole already.
    resharding().train(step, mixed=MIXED)


@program(2)
def evaluated_between():
    def step(side, x, i):
        loss = plain(side, x, i)
        if i % 6 == 2:
            with torch.no_grad():
                loss = loss + side.model(x).sum()  # eager: it leaves the root whole
        return loss

    resharding().train(step)
