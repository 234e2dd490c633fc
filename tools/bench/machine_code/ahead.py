"""Compile the kernels ahead of time, for a GPU that need not be here, and read what came out.

What a test without a GPU can know of machine code: whether loads of gathered data stay behind their
waits and stores before their signals, spills, registers, shared memory, tensor-core and vector
instructions. ``gate`` turns that into problems.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from machine_code.hoisting import COPY, early_signal, hoisted_load

TENSOR_CORES = re.compile(r"\b(HGMMA|HMMA|IMMA|UTCHMMA|UTCQMMA|UTCMMA)\b")


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel to compile: argument types (``*bf16``, ``i32`` ...), constants, and what it
    promises.

    ``aligned`` arguments are multiples of 16, as torch's allocations and good shapes are.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    aligned: tuple[str, ...]
    warps: int
    stages: int = 3
    max_registers: int = 255
    max_shared: int = 227 << 10
    tensor_cores: bool = False
    wide_loads: bool = True


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a compiled kernel. ``narrow_loads`` are loads of 16 bits or fewer from global
    memory.
    """

    name: str
    capability: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    tensor_core_instructions: int
    wide_loads: int
    narrow_loads: int
    async_copies: int
    hoisted: str
    early_signal: str


def compile_build(build: Build, capability: int) -> tuple[Facts, Any]:
    """Compile for ``capability`` (80, 90, 100); facts, and triton's compiled kernel."""
    names = build.kernel.arg_names
    source = ASTSource(
        fn=build.kernel,
        signature={
            name: "constexpr" if name in build.constants else build.signature[name]
            for name in names
        },
        constexprs={(names.index(name),): value for name, value in build.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in build.aligned},
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": build.warps, "num_stages": build.stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        with open(path, "wb") as file:
            file.write(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "-res-usage", path)
        sass = _tool("cuobjdump", "-sass", path)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage for {build.name}: {usage[:200]}")
    facts = Facts(
        name=build.name,
        capability=capability,
        registers=int(found[1]),
        spill_bytes=int(found[2]) + int(found[3]),
        shared_bytes=int(compiled.metadata.shared),
        tensor_core_instructions=len(TENSOR_CORES.findall(sass)),
        wide_loads=len(re.findall(r"\b(?:LDG|LDGSTS|LD)\.E\S*\.128", sass)),
        narrow_loads=len(re.findall(r"\b(?:LDG|LD)\.E\S*\.[US](?:8|16)\b", sass)),
        async_copies=len(COPY.findall(compiled.asm["ttgir"])),
        hoisted=hoisted_load(compiled.asm["ttgir"], sass),
        early_signal=early_signal(compiled.asm["ttgir"]),
    )
    return facts, compiled


def gate(build: Build, facts: Facts) -> list[str]:
    """List the faults of a compiled kernel; empty if it has none."""
    problems = [problem for problem in (facts.hoisted, facts.early_signal) if problem]
    if facts.spill_bytes:
        problems.append(f"{facts.spill_bytes} bytes a thread are spilled")
    if facts.registers > build.max_registers:
        problems.append(f"{facts.registers} registers of {build.max_registers}")
    budget = min(build.max_shared, (163 << 10) if facts.capability < 90 else build.max_shared)
    if facts.shared_bytes > budget:
        problems.append(f"{facts.shared_bytes} bytes of shared memory of {budget}")
    if build.tensor_cores and not facts.tensor_core_instructions:
        problems.append("no tensor-core instruction")
    if build.tensor_cores and not facts.async_copies:
        problems.append("the loop over K is not pipelined")
    if build.wide_loads and (not facts.wide_loads or facts.narrow_loads):
        problems.append(f"{facts.narrow_loads} narrow loads, {facts.wide_loads} of 128 bits")
    return [f"{facts.name} for sm_{facts.capability}: {problem}" for problem in problems]


def _tool(name: str, *arguments: str) -> str:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", name)
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
