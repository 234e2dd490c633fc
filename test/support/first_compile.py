"""What the first compile of a process imports and makes for all that follow: about two seconds,
before ranks are forked.

Imported by name (``preloaded.py``). Each compile leaves out what only Dynamo's log tells. Nothing
here depends on a program or on options, starts a thread or asks for a GPU; private names are those
of torch 2.13, and what another torch lacks is left for the ranks to make.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import pkgutil

import preloaded
import torch

import dynamo_dist
import inductor_passes

# By what imports them: reading the sources of C++ extensions, Inductor's printing of C++, a
# compile's log.
LATER = """torch._dynamo.backends.inductor torch._dynamo.repro.after_dynamo torch._export.db.logging torch._inductor.codegen.cpp
torch.distributed.fsdp torch.distributed.tensor.experimental torch.utils.cpp_extension sympy.tensor.tensor""".split()
NOT_OURS = ("__main__", "kernels")  # programs, and Triton's language


def _import_all() -> None:
    for package in (inductor_passes, dynamo_dist):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not set(NOT_OURS) & {*found.name.split(".")}:
                importlib.import_module(found.name)
    for name in LATER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _make_patterns() -> None:
    """Inductor's patterns, which it traces. By the arguments of its own calls: it keeps what was
    made by these.
    """
    from torch._inductor.fx_passes import joint_graph, post_grad

    joint_graph.lazy_init(torch.device("cpu"))
    post_grad.lazy_init()


def _read_sources() -> None:
    """The digests of torch's and of Triton's files that stand in every key."""
    from torch._inductor import codecache

    for name in ("torch_key", "triton_key"):
        getattr(codecache, name)()


def _try_vector_units() -> None:
    """Libraries that are built and loaded to know the CPU's vector units."""
    from torch._inductor import cpu_vec_isa

    cpu_vec_isa.valid_vec_isa_list()


_import_all()
for each in (preloaded.time_no_guards, _make_patterns, _read_sources, _try_vector_units):
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        each()
# What is older than a rank need not be looked through for its garbage: a fifth of the time of its
# compiles.
gc.collect()
gc.freeze()
