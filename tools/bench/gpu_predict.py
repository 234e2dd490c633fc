"""The part of ``gpu.py`` that needs no GPU: shapes, machine code, predicted times."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from typing import Any

import gpu_products
import torch
from gpu_products import PRODUCTS, RATES, TOPOLOGY, WORLD
from machine_code.ahead import gate
from machine_code.builds import builds, facts_of

from inductor_passes.cost import load_topology
from inductor_passes.cost.collectives import GroupShape
from inductor_passes.cost.machine import Machine
from inductor_passes.fused import fusion
from inductor_passes.fused.kernels.all_reduce_add_norm import TWO_SHOT_BYTES
from inductor_passes.torch_compat.aot import fake_tensor_mode

NORMS = (64, 512, 4096)
CAPABILITY = 90
ops = torch.ops.inductor_passes


def check_shapes() -> list[str]:
    """Every operator on fake tensors of the measured shapes: what comes out wrong."""
    problems = []
    with fake_tensor_mode():

        def t(*shape: int) -> torch.Tensor:
            return torch.empty(*shape, device="cuda", dtype=torch.bfloat16)

        for m, n, k in PRODUCTS:
            (out,) = ops.all_gather_matmul(
                t(m // WORLD, k), [t(k, n)], [], "none", False, "0", WORLD
            )
            part = ops.matmul_reduce_scatter(t(m, k), t(k, n), "sum", "0", WORLD)
            if out.shape != (m, n) or part.shape != (m // WORLD, n):
                problems.append(f"{m} x {n} x {k}: got {list(out.shape)} and {list(part.shape)}")
        for rows in NORMS:
            y, total, rstd, _ = ops.all_reduce_add_rmsnorm(
                t(rows, 8192), t(rows, 8192), None, t(8192), 1e-5, torch.bfloat16, "0"
            )
            if (y.shape, total.shape, rstd.shape) != ((rows, 8192), (rows, 8192), (rows, 1)):
                problems.append(f"norm of {rows} rows: got {list(y.shape)}")
    return problems


def check_code() -> list[str]:
    """What the gate finds in the kernels as compiled for the measured device."""
    wanted = builds(CAPABILITY)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=spawn) as pool:
        facts = pool.map(facts_of, [b.name for b in wanted], [CAPABILITY] * len(wanted))
        return [p for b, f in zip(wanted, facts, strict=True) for p in gate(b, f)]


def predict() -> list[dict[str, Any]]:
    """Unfused (nothing hidden) and fused times on the topology, and how far fused is from the
    longer part.
    """
    machine = Machine(load_topology(TOPOLOGY))
    group = GroupShape(WORLD, nodes=1)
    rows: list[dict[str, Any]] = []

    def row(
        kernel: str, shape: str, matmul: float, comm: float, unfused: float, fused: float
    ) -> None:
        gain = fusion.Prediction(unfused, fused)
        rows.append(
            {
                "kernel": kernel,
                "shape": shape,
                "t_matmul": matmul,
                "t_comm": comm,
                "unfused": unfused,
                "fused": fused,
                "gain": f"{gain.gain:.0%}",
                "taken": gain.pays,
            }
        )

    for m, n, k in PRODUCTS:
        matmul = machine.kernel_us(0.0, 2.0 * m * n * k, "bfloat16", starts=False)
        shape = f"{m} x {n} x {k}"
        payload = m // WORLD * k * 2
        comm = machine.call_us("all_gather", [payload], group)
        fused = fusion.all_gather_matmul_us(machine, payload, WORLD, matmul, 0)
        row("all_gather_matmul", shape, matmul, comm, matmul + comm, fused)
        for gb_per_s in RATES:  # as measured beside an emulated link
            comm = (WORLD - 1) * payload / gb_per_s / 1e3
            fused = gpu_products.predicted(m, n, k, gb_per_s, matmul, comm)["predicted_fused"]
            name = f"{shape} at {gb_per_s:.0f} GB/s"
            row("all_gather_matmul", name, matmul, comm, matmul + comm, fused)
        result = m // WORLD * n * 2
        comm = machine.call_us("reduce_scatter", [WORLD * result], group)
        fused = fusion.matmul_reduce_scatter_us(machine, result, WORLD, matmul)
        row("matmul_reduce_scatter", shape, matmul, comm, matmul + comm, fused)
    for count in NORMS:
        payload = count * 8192 * 2
        comm = machine.call_us("all_reduce", [payload], group)
        two_shot = payload > TWO_SHOT_BYTES
        fused = fusion.all_reduce_norm_us(machine, payload, WORLD, two_shot=two_shot, streams=3)
        memory = machine.memory_us(4 * payload)
        row("all_reduce_add_rmsnorm", f"{count} x 8192", 0.0, comm, comm + memory, fused)
    return rows
