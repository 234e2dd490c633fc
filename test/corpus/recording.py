"""What a program launches: each call that reaches c10d, eager or compiled.

Every collective, whoever calls it, ends in an operator of the namespace ``c10d``. ``Recorder`` stands in for their CPU kernels and notes
kind, members, bytes, dtype, reduce op and peer before it calls them. So an eager program and a compiled one are recorded alike, and a launch
inside an opaque operator is seen too.

Some calls say one thing in several ways, and are noted alike: a list as one tensor (padded to the longest, as uneven ones are sent), complex
numbers as pairs of real ones, a coalesced launch as one for each tensor.
"""
import contextlib
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


@dataclass(frozen=True)
class Launch:
    """One launch on this rank. ``members`` are global ranks, ``peer`` is a root, destination or source within the group, -1 for none."""

    kind: str
    members: tuple[int, ...]
    nbytes: int
    dtype: str
    reduce_op: str = ""
    peer: int = -1

    def row(self):
        """As JSON."""
        return [self.kind, list(self.members), self.nbytes, self.dtype, self.reduce_op, self.peer]


def _size(tensor):
    return tensor.numel() * tensor.element_size()


def dtype_name(tensor):
    """The element type, that of the parts for complex numbers."""
    return str(tensor.dtype.to_real()).removeprefix("torch.")


def _longest(tensors):
    return max(map(_size, tensors)) * len(tensors)


# Operator of c10d -> kind, and (bytes, tensor) of each launch, from its arguments by name.
C10D = {
    "allreduce_": ("all_reduce", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "allreduce_coalesced_": ("all_reduce", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "reduce_": ("reduce", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "broadcast_": ("broadcast", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "allgather_": ("all_gather", lambda a: [(_longest(out), out[0]) for out in a["output_tensors"]]),
    "_allgather_base_": ("all_gather", lambda a: [(_size(a["output_tensor"]), a["input_tensor"])]),
    "allgather_into_tensor_coalesced_": ("all_gather", lambda a: [(_size(o), i) for o, i in zip(a["outputs"], a["inputs"])]),
    "allgather_coalesced_": ("all_gather", lambda a: [(_size(i) * len(a["output_lists"]), i) for i in a["input_list"]]),
    "reduce_scatter_": ("reduce_scatter", lambda a: [(_longest(i), i[0]) for i in a["input_tensors"]]),
    "_reduce_scatter_base_": ("reduce_scatter", lambda a: [(_size(a["input_tensor"]), a["input_tensor"])]),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", lambda a: [(_size(t), t) for t in a["inputs"]]),
    "alltoall_": ("all_to_all", lambda a: [(sum(map(_size, a["input_tensors"])), a["input_tensors"][0])]),
    "alltoall_base_": ("all_to_all", lambda a: [(_size(a["input"]), a["input"])]),
    "gather_": ("gather", lambda a: [(_size(t), t) for t in a["input_tensors"]]),
    "gather_into_tensor_": ("gather", lambda a: [(_size(a["input_tensor"]), a["input_tensor"])]),
    "scatter_": ("scatter", lambda a: [(_size(t), t) for t in a["output_tensors"]]),
    "send": ("send", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "recv_": ("recv", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "recv_any_source_": ("recv", lambda a: [(_size(t), t) for t in a["tensors"]]),
    "barrier": ("barrier", lambda a: [(0, None)]),
    "monitored_barrier_": ("barrier", lambda a: [(0, None)]),
}
PEER = ("root_rank", "dst", "src")


def _reduce_op(op):
    """The name of c10d's ReduceOp, which reaches a kernel as a script object up to 2.14."""
    if op is None:
        return ""
    if hasattr(dist.ReduceOp, "unbox"):
        op = dist.ReduceOp.unbox(op)
        return op.__getstate__()[0].name.lower()
    return REDUCE_OPS[op.op()]


class Recorder:
    """While ``on()``, ``launches`` grows by what reaches c10d. One for the process: kernels of c10d are taken over once."""

    def __init__(self):
        self.launches = None
        self._library = torch.library.Library("c10d", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for name in C10D:
                if hasattr(torch.ops.c10d, name):
                    self._take_over(name)

    def _take_over(self, name):
        kernel = torch.library.get_kernel(f"c10d::{name}", "CPU")
        arguments = [argument.name for argument in getattr(torch.ops.c10d, name).default._schema.arguments]

        def record(keys, *values):
            if self.launches is not None:
                self._note(name, dict(zip(arguments, values)))
            return kernel.call_boxed(keys, *values)
        self._library.impl(name, record, "CPU", with_keyset=True)

    def _note(self, name, arguments):
        kind, payloads = C10D[name]
        members = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(arguments["process_group"])))
        peer = next((arguments[n] for n in PEER if n in arguments), -1)
        for nbytes, tensor in payloads(arguments):
            dtype = "" if tensor is None else dtype_name(tensor)
            self.launches.append(Launch(kind, members, nbytes, dtype, _reduce_op(arguments.get("reduce_op")), peer))

    def close(self):
        """Give c10d its kernels back."""
        self._library._destroy()

    @contextlib.contextmanager
    def on(self, into):
        """Record into the list ``into``; nests, and the inner list gets what is launched inside."""
        before, self.launches = self.launches, into
        try:
            yield
        finally:
            self.launches = before
