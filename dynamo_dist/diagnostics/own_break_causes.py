"""The causes of this package's own breaks, and the form of a cause."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """One row. The three patterns are searched for and all that are given must be found.

    ``kind`` is matched with Dynamo's fixed name of the break, ``detail`` with its explanation and
    developer's context, ``calls`` with the lines ``file: function: code`` from the user's line
    inwards (files of torch start with ``torch/``, the user's have no folder). ``why`` and ``fix``
    may name groups of the patterns as ``$group``; ``fix`` is Python or shell code, and "" means
    that Dynamo's hints serve.
    """

    name: str
    why: str
    fix: str = ""
    kind: str = ""
    detail: str = ""
    calls: str = ""


OWN: tuple[Cause, ...] = (
    Cause(
        name="object_collective",
        kind=r"^Collective on Python objects$",
        detail=r"torch\.distributed\.(?P<collective>\w+)",
        why=(
            "$collective pickles Python objects and gives new ones at every call, which decide "
            "what the program does next: a graph that holds one call's objects would be wrong for "
            "the next."
        ),
        fix=(
            "# exchange the objects outside, pass the result in as a plain value\n"
            "objects = [None] * dist.get_world_size(group)\n"
            "dist.all_gather_object(objects, mine, group=group)\n"
            "y = compiled(x, objects)"
        ),
    ),
    Cause(
        name="reduce_op_without_name",
        kind=r"^Reduce op that cannot be written in a graph$",
        why=(
            "A graph holds the reduce op as text; a premultiplied sum whose factor is a tensor "
            "has none."
        ),
        fix="x.mul_(factor)    # the same sum\ndist.all_reduce(x, group=group)",
    ),
    Cause(
        name="receive_from_any",
        kind=r"^Receive from any rank that returns the sender$",
        why=(
            "recv without a source returns the sender's rank, which is known only when the graph "
            "runs."
        ),
        fix="dist.recv(x, src=sender)\n# or, if nobody asks who sent it\ndist.irecv(x).wait()",
    ),
    Cause(
        name="coalesced_kinds",
        kind=r"^Collectives of several kinds in one coalescing manager$",
        why=(
            "A coalescing manager makes one launch of what is called inside, so that must be of "
            "one kind."
        ),
        fix=(
            "with _coalescing_manager(group=group):\n"
            "    dist.all_reduce(x, group=group)\n"
            "with _coalescing_manager(group=group):\n"
            "    dist.all_gather_into_tensor(out, y, group=group)"
        ),
    ),
    Cause(
        name="future_leaves",
        kind=r"^A callback on a collective's future leaves the graph$",
        why="The callback would run outside the compiled function, where its tensors are no more.",
        fix="value = work.get_future().then(callback).wait()    # inside the function",
    ),
    Cause(
        name="work_member",
        kind=r"^Attribute of a Work or its future that is not traced$",
        why="It tells of the backend's own object, which exists only while the graph runs.",
        fix="work.wait()    # a Work in a graph has wait, is_completed, result and get_future",
    ),
    Cause(
        name="late_wait",
        kind=r"^Wait for a Work of an earlier launch after a launch in the graph$",
        why=(
            "A Work from outside is waited for before the graph runs. Peers may need this graph's "
            "launch first, and would wait for ever."
        ),
        fix=(
            "work.wait()    # before the first collective of the compiled function\ny = compiled(x)"
        ),
    ),
    Cause(
        name="method_in_c",
        kind=r"^Method of a distributed object that is written in C\+\+$",
        detail=r"(?P<owner>\w+)\.(?P<method>\w+)",
        why=(
            "$method of $owner is no constant of the object, and there is no Python of it to trace."
        ),
        fix="value = ask(group)    # before the compiled function\ny = compiled(x, value)",
    ),
    Cause(
        name="group_created_inside",
        kind=r"^Process group or mesh created while tracing$",
        why=(
            "Creating one is collective: if a single rank recompiles, it waits for the others for "
            "ever. No equal one has been created since the plugin was enabled."
        ),
        fix=(
            "made = dist.new_group(ranks)    # or init_device_mesh: once, at start-up, on every "
            "rank\n\n"
            "@torch.compile\n"
            "def step(x):\n"
            "    dist.all_reduce(x, group=made)\n"
            "    return x"
        ),
    ),
    Cause(
        name="comm_debug_inside",
        kind=r"^CommDebugMode inside a compiled function$",
        why="It counts what runs inside it, and a graph runs later, without it.",
        fix=(
            "# count in eager mode, around the call\n"
            'with torch.compiler.set_stance("force_eager"), CommDebugMode() as mode:\n'
            "    compiled(x)"
        ),
    ),
    Cause(
        name="dtensor_leaf_inside",
        kind=r"^New DTensor that requires gradients$",
        why="A tensor made inside a compiled function cannot be a leaf that collects gradients.",
        fix=(
            "weight = distribute_tensor(x, mesh, placements).requires_grad_()    # outside\n"
            "y = compiled(weight)"
        ),
    ),
    Cause(
        name="dtensor_subclass",
        kind=r"^Tensor of a subclass of DTensor$",
        why="A graph makes DTensors and knows nothing of a class that derives from it.",
        fix="y = compiled(DTensor.from_local(x.to_local(), x.device_mesh, x.placements))",
    ),
    Cause(
        name="branches_with_gradients",
        kind=r"^torch\.cond over DTensors that require gradients$",
        why=(
            "Both branches are computed and one result is taken, so that ranks launch alike: what "
            "is infinite in the branch "
            "that is not taken would make its gradient NaN."
        ),
        fix=(
            "y = torch.cond(condition, one, other, (x.to_local(),))    # where branches need no "
            "other rank"
        ),
    ),
    Cause(
        name="loop_over_dtensors",
        kind=r"^while_loop over DTensors$",
        why=(
            "How often a loop runs is known when the graph runs; its body is a graph of local "
            "tensors."
        ),
        fix=(
            "n, y = while_loop(condition, body, (n, x.to_local()))    # where the body needs no "
            "other rank"
        ),
    ),
    Cause(
        name="dtensor_copied",
        kind=r"^Copy of a DTensor that requires gradients$",
        why=(
            "The copy would be a leaf that collects gradients, which a compiled function cannot "
            "make."
        ),
        fix=(
            "y = copy.deepcopy(x)    # outside\nz = compiled(x, y)\n# or, inside\n"
            "y = x.detach().clone()"
        ),
    ),
    Cause(
        name="data_dependent_dtensor_size",
        kind=r"^Operation on DTensors whose result is as large as the data says$",
        why=(
            "A graph needs the sizes of a DTensor, of all ranks together and of this rank's part. "
            "How large this result is, "
            "only the data tells."
        ),
        fix=(
            "y = torch.where(mask, x, 0).sum()                # of a fixed size, in place of "
            "x[mask].sum()\n"
            "y = torch.nonzero_static(x, size=n)              # with a bound on how many there "
            "are\n"
            "y = torch.unique(x.full_tensor())                # or on a plain tensor, which every "
            "rank has"
        ),
    ),
    Cause(
        name="from_local_run_check",
        kind=r"^DTensor\.from_local with run_check$",
        why="The check compares Python objects that all ranks send, which no graph can hold.",
        fix="x = DTensor.from_local(local, mesh, placements, run_check=False)",
    ),
    Cause(
        name="gradient_layout",
        kind=r"^Layout of a gradient in a backward hook$",
        why=(
            "How a gradient is laid out is decided when the backward graph is made, after this "
            "trace."
        ),
        fix="grad = grad.redistribute(mesh, [Replicate()])    # first in the hook: now it is known",
    ),
    Cause(
        name="unusual_source_placement",
        kind=r"^Tensor distributed from one rank in an unusual placement$",
        why="How the source's data becomes this placement is code that cannot be traced.",
        fix=(
            "# where all ranks hold the same tensor\n"
            "d = distribute_tensor(x, mesh, placements, src_data_rank=None)"
        ),
    ),
    Cause(
        name="backward_hook_with_effects",
        kind=r"^Module backward hook that is no plain computation$",
        why=(
            "The backward graph is compiled once, so a backward hook may compute new gradients "
            "from those it is given and do nothing else."
        ),
        fix=(
            "torch._dynamo.config.compiled_autograd = True    # before the first call: hooks run "
            "as they are\n"
            "y = self.inner(x)\ny.register_hook(hook)    # or hook the tensor instead of the module"
        ),
    ),
    Cause(
        name="backward_inside",
        kind=r"^backward\(\) inside a compiled function$",
        why=(
            'backward() is traced in what names backend="dynamo_dist", but for a parameter with a '
            "hook, with a sparse gradient, or of DDP and used beside its forward. For other "
            "backends the compiled forward brings a backward graph of its own, which runs when "
            "backward is called outside."
        ),
        fix=(
            'step = torch.compile(step, backend="dynamo_dist")    # forward, backward and update\n'
            "# or\n"
            "loss = compiled(x)\nloss.backward()"
        ),
    ),
    Cause(
        name="rate_after_scheduler",
        kind=r"^learning rate read after scheduler\.step\(\) in one graph$",
        why=(
            "A scheduler steps when the graph has run: what reads a learning rate behind it, such "
            "as another optimizer.step(), would read the rate from before."
        ),
        fix=(
            "optimizer.step()\n"
            'rate = optimizer.param_groups[0]["lr"]    # before the scheduler\n'
            "scheduler.step()"
        ),
    ),
    Cause(
        name="gradient_inside",
        kind=r"^torch\.autograd\.grad inside a compiled function$|^autograd\.grad (with|consumed)",
        why=(
            "Gradients are computed in the graph, but for those of tensors with hooks or with a "
            "history from outside, of "
            "what the function returns undetached, and beside parameters of FSDP2 and DDP."
        ),
        fix=(
            "(gradient,) = torch.autograd.grad(loss, x)\n"
            "report(loss.detach())    # no more gradients of what it used up"
        ),
    ),
    Cause(
        name="ddp_inside",
        kind=r"^DistributedDataParallel module called in a compiled function$",
        why=(
            "DDP's averages are in the graph, but for communication hooks, join(), "
            "mixed_precision, a static graph "
            "that has not run yet, and a forward that holds another graph break."
        ),
        fix=(
            "model = torch.compile(DistributedDataParallel(module))    # without what the break "
            "names\n"
            "# or with what it names, and the averages outside\n"
            "ddp = DistributedDataParallel(torch.compile(module, fullgraph=True))"
        ),
    ),
    Cause(
        name="fsdp_inside",
        kind=r"^FSDP2 module called in a compiled function$",
        why=(
            "FSDP2's gathers and reductions are in the graph, but for offloading, communication of "
            "your own, a forward that holds another graph break, and one whose root runs in eager "
            "mode."
        ),
        fix=(
            "model = torch.compile(fully_shard(model))    # the root, without what the break "
            "names\n"
            "# or each block, with the gathers outside\n"
            "block.compile(fullgraph=True)\n"
            "fully_shard(block)"
        ),
    ),
    Cause(
        name="changed_for_eager",
        detail=r"it runs in eager mode, around graphs",
        why=(
            "The plugin changes the function for eager mode, which the call is left to: in a "
            "forward of DDP, for instance, "
            "because of another graph break in it."
        ),
        fix=(
            "# the wrapper in eager mode, and what it wraps in graphs\n"
            "ddp = DistributedDataParallel(torch.compile(module))"
        ),
    ),
    Cause(
        name="fsdp_gathered_inside",
        kind=r"^Parameters of an FSDP2 module gathered or freed in a compiled function$",
        why="unshard and reshard change the storage of parameters, which a graph takes as inputs.",
        fix="model.unshard()\ny = compiled(x)\nmodel.reshard()",
    ),
    Cause(
        name="state_dict_inside",
        kind=r"^state_dict\(\) in a compiled function$",
        why="state_dict sets an attribute of a dictionary, which this torch cannot trace.",
        fix="tensors = {name: p.detach() for name, p in model.named_parameters()}",
    ),
)
