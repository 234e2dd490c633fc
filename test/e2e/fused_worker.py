"""Compiles a tensor-parallel block on fake CUDA tensors; prints what Inductor's code calls, as
JSON.

No device is here: Inductor is told of one, and stopped when it has the code. In a process of its
own, because what it is told would stay.
"""

import contextlib
import json
import types
from unittest import mock

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._inductor.fx_passes import joint_graph, post_grad
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh

import inductor_passes as ip
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group

DEVICE = types.SimpleNamespace(
    name="H100",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 << 30,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    L2_cache_size=50 << 20,
    shared_memory_per_block=48 << 10,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_multiprocessor=228 << 10,
    gcnArchName="",
)
TOLD = {
    "get_device_properties": DEVICE,
    "get_compute_capability": 90,
    "current_device": 0,
    "is_available": True,
    "is_triton_capable": True,
    "is_bf16_supported": True,
    "raise_if_triton_unavailable": None,
}


class Generated(Exception):
    """Carries the code out of the compiler."""


def stop_with_code(graph):
    code, _ = graph.codegen()
    raise Generated(getattr(code, "value", code))


def block(mesh, x, up, down, residual, weight):
    """DTensors: sequence parallel between, tensor parallel inside; then a partial output and its
    norm.
    """
    placed = ((x, Shard(0)), (up, Shard(1)), (down, Shard(0)), (residual, Replicate()))
    x, up, down, residual = (DTensor.from_local(t, mesh, [p], run_check=False) for t, p in placed)
    weight = DTensor.from_local(weight, mesh, [Replicate()], run_check=False)
    hidden = torch.relu(x.redistribute(placements=[Replicate()]) @ up)
    mine = (hidden @ down).redistribute(placements=[Shard(0)]).to_local()
    partial = DTensor.from_local(mine, mesh, [Partial()], run_check=False)
    total = partial.redistribute(placements=[Replicate()]) + residual
    normed = torch.nn.functional.rms_norm(total, (total.shape[-1],), weight, 1e-6)
    return normed.to_local(), total.to_local()


def generated(**options):
    shapes = ((1024, 8192), (8192, 1024), (1024, 8192), (1024, 8192), (8192,))
    torch._dynamo.reset()
    mesh = init_device_mesh("cuda", (8,))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
        try:
            torch.compile(block, fullgraph=True, options=ip.options(**options))(mesh, *inputs)
        except BaseException as error:  # Dynamo wraps what a compile raises
            cause = error
            while cause is not None and not isinstance(cause, Generated):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            return str(cause)
    raise AssertionError("nothing was compiled")


def calls(code):
    found = []
    for line in code.splitlines():
        for space in ("inductor_passes", "_c10d_functional"):
            before, _, after = line.partition(f"torch.ops.{space}.")
            if (after and before.rstrip().endswith("=")) or (after and not before.strip()):
                found.append(after.split(".")[0])
    return found


def main():
    with contextlib.ExitStack() as stack:
        for module in (joint_graph, post_grad):
            # patterns are traced on the inputs' device: now, before that is cuda
            module.lazy_init()
            stack.enter_context(mock.patch.object(module, "lazy_init", lambda *a, **k: None))
        patches = {
            "torch.cuda.get_device_properties": lambda *a: DEVICE,
            "torch.cuda.get_device_capability": lambda *a: (9, 0),
            "torch.cuda.current_device": lambda: 0,
            "torch.cuda.device_count": lambda: 8,
            "torch.utils._triton.triton_hash_with_backend": lambda: "fake",
            "torch._inductor.graph.GraphLowering.compile_to_module": stop_with_code,
            "inductor_passes.fused.kernels.availability.why_not": lambda group, device: "",
        }
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        for name, answer in TOLD.items():
            stand_in = staticmethod(lambda *a, _answer=answer, **k: _answer)
            stack.enter_context(mock.patch.object(CudaInterface, name, stand_in))
        stack.enter_context(config.patch(compile_threads=1, force_disable_caches=True))
        stack.enter_context(fake_group(8))
        with recorder.records_of_block() as records:
            fused = calls(generated())
        notes = [note for record in records for p in record.passes for note in p.notes]
        exact = calls(generated(exact=True))
    print(json.dumps({"fused": fused, "exact": exact, "notes": notes}))


main()
