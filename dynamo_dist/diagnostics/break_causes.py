"""The causes of breaks that distributed programs meet, and what to write instead."""

from __future__ import annotations

from dynamo_dist.diagnostics.own_break_causes import OWN, Cause

_GROUP_MAKERS = r"new_group|new_subgroups\w*|split_group|_new_group_with_tag|shrink_group"
_MESH_MAKERS = r"init_device_mesh|from_group|_unflatten|_flatten|DeviceMesh\("
_OBJECT_COLLECTIVES = (
    r"all_gather_object|gather_object|broadcast_object_list|scatter_object_list|"
    r"send_object_list|recv_object_list"
)
_COLLECTIVES = (
    r"reduce_scatter\w*|all_to_all\w*|all_gather\w*|all_reduce\w*|broadcast|scatter|gather|reduce"
)


CATALOG: tuple[Cause, ...] = (
    *OWN,
    Cause(
        name="recompile_limit",
        kind=r"(recompile|cache) limit exceeded",
        why=(
            "The function was compiled for so many different inputs that Dynamo gave up on it, and "
            "it runs eagerly from now on. The table of recompiles names the guard that kept "
            "failing."
        ),
        fix=(
            "# make the value that changes a tensor or mark its size dynamic\n"
            "torch._dynamo.mark_dynamic(x, 0)\n"
            "# or allow more versions of the function\n"
            "torch._dynamo.config.recompile_limit = 32"
        ),
    ),
    Cause(
        name="async_op",
        kind=r"async_op=True for distributed collectives",
        why=(
            "A collective with async_op=True returns a Work object, and a graph has no value for "
            "it. Only the synchronous form is replaced by a graph operation here."
        ),
        fix=(
            "# the functional form returns a tensor and waits at its first use\n"
            "import torch.distributed._functional_collectives as funcol\n"
            'y = funcol.all_reduce(x, "sum", group)   # launch\n'
            "z = independent_compute()                # runs meanwhile\n"
            "return y + z                             # waits here"
        ),
    ),
    Cause(
        name="work_method",
        kind=r"Unsupported method call",
        detail=r"method `(?P<method>\w+)` of class `(?P<work>\w*Work)`",
        why=(
            "A $work that eager code made is an ordinary Python object to Dynamo: it cannot put "
            "`$method` into a graph."
        ),
        fix=(
            "# finish the eager collective before the compiled function is entered\n"
            "work = dist.all_reduce(x, async_op=True)\n"
            "work.wait()\n"
            "y = compiled(x)"
        ),
    ),
    Cause(
        name="nn_functional_collective",
        detail=r"torch\.distributed\.nn\.functional\.(?P<collective>\w+) is not supported",
        why=(
            "torch.distributed.nn.functional.$collective refuses to run under torch.compile: its "
            "autograd function talks to the process group directly."
        ),
        fix=(
            "# the functional collectives have the same meaning and a backward\n"
            "import torch.distributed._functional_collectives as funcol\n"
            "y = funcol.all_gather_tensor_autograd(x, 0, group)\n"
            'y = funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group)'
        ),
    ),
    Cause(
        name="from_local_run_check",
        calls=r"run_check=True|\bcheck_tensor_meta\b",
        why=(
            "run_check=True compares shapes across the ranks and broadcasts, whenever it is "
            "called; that is a conversation between ranks and not a value in a graph."
        ),
        fix="x = DTensor.from_local(local, mesh, placements, run_check=False)",
    ),
    Cause(
        name="object_collective",
        calls=rf"\b(?P<collective>{_OBJECT_COLLECTIVES})\b",
        why=(
            "$collective pickles Python objects and reads their sizes back from the other ranks: "
            "there is nothing in it that a graph of tensors can hold."
        ),
        fix=(
            "# exchange the objects outside, pass the result in as a plain value\n"
            "objects = [None] * dist.get_world_size(group)\n"
            "dist.all_gather_object(objects, mine, group=group)\n"
            "y = compiled(x, objects)"
        ),
    ),
    Cause(
        name="group_created_inside",
        calls=rf"\b(?P<maker>{_GROUP_MAKERS})\b",
        why=(
            "$maker creates a process group, which every rank has to do together; a graph is "
            "compiled by each rank alone and run many times."
        ),
        fix=(
            "group = dist.new_group(ranks)    # once, at start-up, on every rank\n\n"
            "@torch.compile\n"
            "def step(x):\n"
            "    dist.all_reduce(x, group=group)\n"
            "    return x"
        ),
    ),
    Cause(
        name="mesh_created_inside",
        calls=rf"\b(?P<maker>{_MESH_MAKERS})",
        why=(
            "A DeviceMesh is made here. That creates process groups, which every rank has to do "
            "together, so it cannot be part of a graph."
        ),
        fix=(
            'mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))  # once, '
            "outside\n\n"
            "@torch.compile\n"
            "def step(x):\n"
            "    return DTensor.from_local(x, mesh, [Shard(0), Replicate()])"
        ),
    ),
    Cause(
        name="opaque_member",
        kind=r"unregistered member on an OpaqueObject",
        detail=r"attr=(?P<member>\w+)",
        why=(
            "Process groups, meshes and placements are opaque to Dynamo: only members that were "
            "registered for their type can be used, and `$member` is not one. This is an error "
            "even with fullgraph=False."
        ),
        fix=(
            "# read it outside and let the compiled function see the plain value\n"
            "value = thing.$member\n"
            "y = compiled(x, value)\n"
            "# or let the plugin register the members that it knows\n"
            "dynamo_dist.enable()"
        ),
    ),
    Cause(
        name="opaque_member",
        kind=r"Unsupported method call",
        detail=r"method `(?P<member>\w+)` of class `(?P<type>ProcessGroup|DeviceMesh)`",
        why="Dynamo knows few methods of $type, and `$member` is not one of them.",
        fix=(
            "# read it outside and let the compiled function see the plain value\n"
            "value = thing.$member()\n"
            "y = compiled(x, value)\n"
            "# or let the plugin register the members that it knows\n"
            "dynamo_dist.enable()"
        ),
    ),
    Cause(
        name="opaque_result",
        kind=r"returned a reference-type opaque object",
        detail=r"Method name: '(?P<member>\w+)'",
        why=(
            "`$member` returns a new process group or mesh. Dynamo guards such objects by where "
            "they come from, and one that is made inside the function comes from nowhere."
        ),
        fix=(
            "# make it once outside and close over it\n"
            "part = mesh.$member(...)\n\n"
            "@torch.compile\n"
            "def step(x):\n"
            "    return DTensor.from_local(x, part, [Shard(0)])"
        ),
    ),
    Cause(
        name="mesh_context",
        kind=r"Unsupported context manager",
        detail=r"DeviceMesh",
        why=(
            "`with mesh:` sets a thread-local default mesh, a side effect that Dynamo does not "
            "trace."
        ),
        fix=(
            "# name the mesh in each call\n"
            "DTensor.from_local(x, mesh, [Shard(0)])\n"
            "distribute_tensor(x, mesh, [Replicate()])"
        ),
    ),
    Cause(
        name="point_to_point",
        kind=r"P2P compilation disabled",
        why="Point-to-point calls are traced only when this torch is told to.",
        fix="export TORCHDYNAMO_ENABLE_P2P_COMPILATION=1",
    ),
    Cause(
        name="barrier",
        calls=r"\b(?P<barrier>monitored_barrier|barrier)\b",
        why=(
            "A barrier orders ranks in time and moves no data: a graph has no value for it, and "
            "the collectives inside a graph order the ranks already."
        ),
        fix="dist.barrier()    # outside\ny = compiled(x)",
    ),
    Cause(
        name="ddp_inside",
        detail=r"of class `Logger`|DistributedDataParallel\._inside_ddp_forward",
        why=(
            "A DistributedDataParallel module is called inside the compiled function. Its forward "
            "talks to a C++ logger and reducer, which are not traceable."
        ),
        fix=(
            "# let DDP be the outermost module of what is compiled\n"
            "model = torch.compile(DistributedDataParallel(module))"
        ),
    ),
    Cause(
        name="fsdp_inside",
        calls=r"torch/distributed/fsdp/|\b(fully_shard|unshard|reshard)\(",
        why=(
            "FSDP2's hooks resize storages and keep eager state between calls: they run outside "
            "the graph, so that the graph ends where a sharded module begins or is changed."
        ),
        fix=(
            "# shard first, then compile the blocks that are sharded\n"
            "for block in model.layers:\n"
            "    block.compile()\n"
            "    fully_shard(block)\n"
            "fully_shard(model)"
        ),
    ),
    Cause(
        name="distribute_tensor_inside",
        calls=r"\b(distribute_tensor|distribute_module)\b",
        why=(
            "distribute_tensor sends rank 0's data to the others with c10d calls that have no form "
            "in a graph."
        ),
        fix=(
            "# where every rank holds the same data already, this needs no communication\n"
            "full = DTensor.from_local(x, mesh, [Replicate()], run_check=False)\n"
            "shard = full.redistribute(placements=[Shard(0)])"
        ),
    ),
    Cause(
        name="dtensor_factory_inside",
        calls=r"\b_dtensor_init_helper\b",
        why="A DTensor factory works out its shard with Python that Dynamo does not trace.",
        fix=(
            "# make the local shard, then say what it is a shard of\n"
            "local = torch.zeros(rows // mesh.size(), columns)\n"
            "x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)"
        ),
    ),
    Cause(
        name="dtensor_built_inside",
        kind=r"Failed to convert args/kwargs to proxy",
        detail=r"DTensorSpec",
        why=(
            "A DTensor is built from its parts (a DTensorSpec) here; the graph can hold tensors "
            "and placements but not that object."
        ),
        fix=(
            "# the public constructor is traceable\n"
            "x = DTensor.from_local(local, mesh, placements, run_check=False)"
        ),
    ),
    Cause(
        name="dtensor_internals",
        detail=r"_DTensor_compute_global_tensor_info",
        why=(
            "DTensor's own Python is compiled here as if it were the user's, because an earlier "
            "break cut the call in two."
        ),
        fix="# mend the earlier break on this line first",
    ),
    Cause(
        name="mode_inside",
        detail=r"is_in_mode_without_ignore_compile_internals",
        why=(
            "A dispatch mode (CommDebugMode, for instance) is entered inside the compiled function."
        ),
        fix=(
            "with CommDebugMode() as comm:    # outside: the call runs in eager mode\n"
            "    y = compiled(x)"
        ),
    ),
    Cause(
        name="mixed_tensors",
        detail=r"(?P<op>[\w.]+) got mixed torch\.Tensor and DTensor",
        why=(
            "$op got a DTensor and a plain tensor: DTensor cannot know how the plain one is laid "
            "out."
        ),
        fix=(
            "# say how the plain tensor is laid out\n"
            "plain = DTensor.from_local(plain, x.device_mesh, [Replicate()], run_check=False)"
        ),
    ),
    Cause(
        name="resolve_group_by_name",
        detail=r"_resolve_process_group",
        why="The group is looked up by name through a C++ function that Dynamo does not trace.",
        fix=(
            "group = dist.distributed_c10d._resolve_process_group(name)    # once, outside\n"
            "y = compiled(x, group)"
        ),
    ),
    Cause(
        name="collective_without_graph_form",
        detail=r"pybind11_(object|type)",
        calls=rf"\b(?P<collective>{_COLLECTIVES})\b",
        why=(
            "$collective in this form has no graph operation, so Dynamo followed it down to the "
            "C++ options object of the process group, which it cannot build."
        ),
        fix=(
            "# say the same with a functional collective\n"
            "import torch.distributed._functional_collectives as funcol\n"
            "y = funcol.broadcast(x, src, group)\n"
            'y = funcol.reduce_scatter_tensor(x, "sum", 0, group)'
        ),
    ),
    Cause(
        name="backward_inside",
        kind=r"Tensor\.(backward|requires_grad_)\(\)|requires_grad_\(\) intermediate",
        why=(
            "The gradient is taken inside the compiled function. The backward graph is made from "
            "the compiled forward, so the call belongs outside."
        ),
        fix=(
            "@torch.compile\n"
            "def forward(x):\n"
            "    return loss_of(x)\n\n"
            "loss = forward(x)\n"
            "loss.backward()    # runs the compiled backward graph"
        ),
    ),
    Cause(
        name="module_backward_hook",
        kind=r"backwards hooks require compiled autograd",
        why=(
            "A module has a full backward hook; the backward graph is compiled without module "
            "borders."
        ),
        fix=(
            "# hook the tensor instead of the module\n"
            "def forward(self, x):\n"
            "    y = self.inner(x)\n"
            "    y.register_hook(hook)\n"
            "    return y"
        ),
    ),
    Cause(
        name="data_dependent_branch",
        kind=r"Data-dependent (branching|assertion)",
        why=(
            "Which way the program goes depends on numbers in a tensor, which are not known while "
            "the graph is made; on several ranks they may even differ, and then so would the "
            "collectives."
        ),
        fix=(
            "y = torch.where(x.sum() > 0, a, b)           # compute both, choose by number\n"
            "y = torch.cond(x.sum() > 0, f, g, (x,))      # compute one of two functions"
        ),
    ),
    Cause(
        name="data_dependent_value",
        kind=(
            r"Tensor\.item\(\)|Tensor\.tolist\(\)|Dynamic shape operator|Dynamic slicing|"
            r"Data dependent operator"
        ),
        why=(
            "A Python number is read out of a tensor, so that the graph ends to find out what it "
            "is."
        ),
        fix=(
            "# keep it a tensor\n"
            "y = x * x.sum()\n"
            "# or let the graph carry the unknown number\n"
            "torch._dynamo.config.capture_scalar_outputs = True"
        ),
    ),
    Cause(
        name="data_dependent_guard",
        detail=r"data-dependent expression (?P<expr>[^\n(]+)",
        why="The code asks whether ${expr}holds, about a number that only the data tells.",
        fix=(
            "# promise what is always true of the number\nn = x.sum().item()\ntorch._check(n > 1)"
        ),
    ),
    Cause(
        name="print_inside",
        kind=r"Failed to trace builtin operator",
        detail=r"builtin (operator )?`?print\b",
        why="print is a side effect that a graph cannot hold.",
        fix=(
            "# print after the graph instead of in its middle\n"
            "torch._dynamo.config.reorderable_logging_functions.add(print)"
        ),
    ),
    Cause(
        name="clock_inside",
        detail=r"builtin `(?P<clock>time\.\w+?)\.?`",
        why=(
            "$clock reads the clock of this process when it runs, and a graph has no place for "
            "that."
        ),
        fix=(
            "# read the clock around the compiled call; a GPU has to be waited for first\n"
            "start = time.perf_counter()\n"
            "y = compiled(x)\n"
            "torch.accelerator.synchronize()\n"
            "seconds = time.perf_counter() - start"
        ),
    ),
    Cause(
        name="debug_level_inside",
        detail=r"get_debug_level",
        why="How much torch.distributed checks is asked of C++ that Dynamo cannot look into.",
        fix=(
            "DEBUG = dist.get_debug_level()   # once, outside: it is set before the job starts\n\n"
            "@torch.compile\n"
            "def f(x):\n"
            "    return checked(x) if DEBUG == dist.DebugLevel.DETAIL else x"
        ),
    ),
    Cause(
        name="history_inside",
        kind=r"Tensor with grad_fn\(\)|Tensor\.retain_grad\(\)",
        why=(
            "Tensors between the operators of a compiled function have no autograd history of "
            "their own: the backward "
            "graph is made of the function as a whole. The function runs without a graph."
        ),
        fix=(
            "# return the value, and ask what was returned\n"
            "y, loss = compiled(x)\n"
            "y.retain_grad()\n"
            "loss.backward()"
        ),
    ),
    Cause(
        name="warning_inside",
        detail=r"module: _warnings, qualname: warn",
        why=(
            "The function that is called here is deprecated and warns; the warning is not "
            "traceable."
        ),
        fix="# call the function that the warning recommends; run eagerly once to read it",
    ),
    Cause(
        name="compile_disabled",
        kind=r"torch\.compiler\.disable\(\)|torch\._dynamo\.disable\(\)",
        why="The function is marked to run eagerly, here or in a library.",
        fix="# remove @torch.compiler.disable, or call the function outside the compiled region",
    ),
)
