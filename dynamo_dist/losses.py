"""What a user would lose without each kind of change, worst first: numbers, hangs, breaks and errors, time, reports."""

from __future__ import annotations

# Why there is no issue upstream.
HOOK = "no public hook"
FAULT = "torch's fault, no issue known"

# By the function that makes the change, with its module: the loss, and the issue upstream or why there is none.
LOSSES = {
    "pending_inputs.pending_inputs_have_gradients": (
        "gradients behind an input in flight are silently missing",
        FAULT,
    ),
    "pending_inputs.write_to_pending_inputs": (
        "writes to an input in flight are silently lost",
        FAULT,
    ),
    "outputs.on_forward_with_tangents": (
        "second gradients through a graph are silently incomplete",
        FAULT,
    ),
    "backward.pending_inputs_stay_pending": (
        "a pending input that is trained and changed in place is wrong",
        FAULT,
    ),
    "numbers.whole_numbers_in_parts": (
        "whole numbers that are to be a pending sum are cut off",
        FAULT,
    ),
    "writes.changes": ("writes to a gathered view of a DTensor are silently lost", FAULT),
    "strategies.on_strategy": (
        "operators on DTensors gather, refuse or compute wrong numbers",
        FAULT,
    ),
    "strategies.on_failed_propagation": (
        "means over uneven shards are wrong; operators without a strategy fail",
        FAULT,
    ),
    "strategies.on_dispatch": (
        "as_strided, collectives and in-place operators on DTensors fail or are wrong",
        FAULT,
    ),
    "specs.in_context_parallel": ("masks are wrong in context_parallel on the CPU", HOOK),
    "random.draw_once": ("a checkpoint on CUDA draws another dropout mask in its backward", FAULT),
    "trackers.retrack": ("graphs made for one group or mesh serve another one", HOOK),
    "ddp.on_eager_ddp_forward": ("an eager forward of DDP among compiled ones is not seen", HOOK),
    "fsdp.on_eager_forward": ("an eager forward of FSDP2 among compiled ones is not seen", HOOK),
    "partition.keep_in_its_pass": (
        "ranks launch in forward or backward as each one's sizes say, and hang",
        HOOK,
    ),
    "placements.cut_empty_shards": (
        "a rank whose shard is empty leaves out launches, and all hang",
        FAULT,
    ),
    "partition.drop_dead_chains": (
        "dead collectives run, twice where another waits for them",
        FAULT,
    ),
    "frames.on_what_is_left_to_python": (
        "a rank that leaves a function to Python launches in another order",
        HOOK,
    ),
    "frames.ask_before_giving_up": (
        "at recompile_limit one rank leaves the order of all others",
        HOOK,
    ),
    "operators.on_clipping": (
        "gradients of which some are plain cannot be clipped together",
        FAULT,
    ),
    "meshes.on_group_creation": (
        "groups made in a compiled function break the graph",
        HOOK,
    ),
    "meshes.on_mesh_creation": (
        "meshes made in a compiled function break the graph",
        HOOK,
    ),
    "trackers.on_object": ("calls of torch.distributed break the graph", HOOK),
    "calls.on_graph_end": (
        "async_op=True breaks the graph, and so does implicit_replication",
        HOOK,
    ),
    "values.on_tensor_uses": (
        "a buffer in flight may be read; sizes told by data end in an error",
        HOOK,
    ),
    "modules.on_methods": ("FSDP2, DDP and their state break the graph", HOOK),
    "modules.on_reads": ("parameters of FSDP2 and DDP are read as shards in a graph", HOOK),
    "modules.on_module_compiled": (
        "hooks of the compiled module, tensor parallel ones too, break the graph",
        HOOK,
    ),
    "fsdp.on_sharding": ("a model that is sharded after its compile is many graphs", HOOK),
    "modules.on_module_backward_hooks": ("full backward hooks of a module break the graph", FAULT),
    "modules.on_tensor_method": (
        "wait(), backward() and hooks of parameters break with another reason",
        HOOK,
    ),
    "gradients.see_histories_of_subclasses": ("autograd.grad of DTensors fails in a graph", FAULT),
    "trackers.on_values": ("a Work or a boxed group from outside breaks the graph", HOOK),
    "trackers.extend_builtins": (
        "str() and isinstance() of meshes, groups and placements break",
        FAULT,
    ),
    "trackers.extend_class_tracker": (
        "type(mesh) == DeviceMesh and hasattr(Shard, ...) break",
        FAULT,
    ),
    "meshes.mesh_as_context": ("'with mesh:' breaks the graph", HOOK),
    "trackers.on_codegen": ("placements that a function returns or keeps break the graph", HOOK),
    "dtensors.on_tensor_attributes": (
        "attributes of DTensors and of what collectives return break",
        HOOK,
    ),
    "guards.register_guards": ("nested_compile_region with a mesh or a group is an error", HOOK),
    "meshes.derive_by_overload": ("Inductor refuses a slice of a mesh in a graph", FAULT),
    "aliases.on_output_aliases": ("a view of a DTensor that a function returns is an error", FAULT),
    "outputs.on_plain_tangent": (
        "an output that no loss uses ends the backward with an error",
        FAULT,
    ),
    "outputs.keep_first_symbols": (
        "dynamic sizes recurse without end; equal meshes leave a graph without an input",
        FAULT,
    ),
    "made_inside.around_traced_calls": (
        "one_hot, interpolate and others fail on DTensors, compiled",
        FAULT,
    ),
    "backward.replicas_in_backward": (
        "the backward of cummax, split and others fails on DTensors",
        FAULT,
    ),
    "autograd_functions.pass_context": (
        "autograd functions of as many tensors as arguments lose their context",
        FAULT,
    ),
    "autograd_functions.gradients_are_apart": (
        "a backward that reduces its gradient in place does not compile",
        FAULT,
    ),
    "random.save_states_before_objects": ("dropout in a checkpoint on DTensors is an error", FAULT),
    "placements.keep_strided_shards": (
        "results in strided shards are an error; wrapping takes longer",
        FAULT,
    ),
    "placements.count_strided_shards_with_real_tensors": ("strided shards do not trace", FAULT),
    "placements.fix_split_factors": (
        "with dynamic sizes, a view that joins dimensions is refused",
        FAULT,
    ),
    "view_sizes.sizes_of_bases_are_inputs": (
        "with dynamic sizes, a view of a DTensor is no input",
        FAULT,
    ),
    "numbers.track_symbolic_results": (
        "with dynamic sizes, convolutions and products of sizes fail",
        FAULT,
    ),
    "factories.random_on_cpu": ("torch.distributed.tensor.rand and randn fail on the CPU", FAULT),
    "calls.allow_point_to_point": ("P2POp breaks the graph", HOOK),
    "compiler.CacheKeyTag": ("torch's caches give graphs of other strategies", HOOK),
    "keys.meshes_by_content": ("graphs that take meshes are compiled anew in each process", FAULT),
    "keys.sources_by_name": ("graphs of FSDP2 and DDP are compiled anew in each process", FAULT),
    "guard_managers.wrap_checks": ("each call compares specs and meshes field by field", HOOK),
    "gradients.wrap_gradients": ("each backward wraps and adds gradients one by one", HOOK),
    "code.wrap_compiled_code": ("each call runs operators through autograd", HOOK),
    "frames.frames_left_alone": (
        "Dynamo compiles this package's functions below a broken one",
        HOOK,
    ),
    "units.few_libraries": ("a cold start builds a library for each C++ kernel", HOOK),
    "vector_units.probed_once_a_host": (
        "each process tries the CPU's vector units for seconds",
        HOOK,
    ),
    "headers.only_for_builds": ("a first compile on a host builds headers of 150 MiB", HOOK),
    "moves.redistribute_changes": (
        "reports do not say which change of placement caused a collective",
        HOOK,
    ),
    "live.Listen": ("reports have neither graph breaks nor recompiles", HOOK),
}
