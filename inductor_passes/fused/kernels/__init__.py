"""Kernels that wait for peers inside: one file each, with its eager reference and its operator.

Importing this package imports no kernel: those need triton, which is not everywhere.
"""

import importlib

OPERATORS = (
    "all_gather_matmul",
    "all_reduce_add_norm",
    "matmul_reduce_scatter",
)


def register_operators() -> None:
    """Make ``torch.ops.inductor_passes`` complete: code from a warm cache calls what no pass has
    imported.
    """
    for module in OPERATORS:
        importlib.import_module(f"{__name__}.{module}")
