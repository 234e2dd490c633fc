"""Inductor's trials of the CPU's vector units."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynamo_dist.torch_compat.changes import Change, WrapAttribute, has
from dynamo_dist.torch_compat.inductor.code import cache_dir


def probed_once_a_host() -> list[Change]:
    """Have a host's trials of its vector units kept, in Inductor's cache folder, once they have succeeded.

    Each process builds libraries for each unit and starts a Python that loads each: ten on a recent processor before the first
    graph, and none of torch's caches holds what came out. A unit that is part of one that has built and loaded the same code
    is not tried with it. What failed is tried again. ``VecISA.check_build`` was seen in 2.13 and 2.14.
    """
    from torch._inductor.cpu_vec_isa import VecISA

    name = "check_build"
    if not has(VecISA, name, off="each process tries the CPU's vector units anew"):
        return []

    def changed(stock: Callable[..., bool]) -> Callable[..., bool]:
        tried: list[Trial] = []  # with success

        @functools.wraps(stock)
        def check_build(self: Any, code: str) -> bool:
            kept = Path(cache_dir(), "dynamo_dist", "vector_units", _name(self, code))
            trial = _trial(self, code)
            if kept.exists():
                tried.append(trial)
                return True
            if any(map(trial.is_part_of, tried)) or stock(self, code):
                tried.append(trial)
                with contextlib.suppress(
                    OSError
                ):  # a folder that cannot be written costs the trial
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    kept.touch()
                return True
            return False

        return check_build

    return [WrapAttribute(VecISA, name, changed)]


@dataclass(frozen=True, slots=True)
class Trial:
    """Code built for a vector unit and loaded: the unit's words, the compiler's flags, the code, what it defines, the host."""

    words: frozenset[str]
    flags: frozenset[str]
    of: tuple[str, ...]

    def is_part_of(self, other: Trial) -> bool:
        """Return whether ``other`` is the same trial with more units allowed."""
        return self.of == other.of and self.words <= other.words and self.flags <= other.flags


def _trial(unit: Any, code: str) -> Trial:
    words, flags = (frozenset(each.split()) for each in (str(unit), unit.build_arch_flags()))
    return Trial(words, flags, (code, *unit.build_macro(), *_host()))


def _name(unit: Any, code: str) -> str:
    """Return a digest of all that a trial depends on: its code and flags, compiler, loader, torch, Python, this host's CPU."""
    return hashlib.sha256("\0".join((code, _fingerprint(unit), *_host())).encode()).hexdigest()[:32]


def _fingerprint(unit: Any) -> str:
    from torch._inductor.cpu_vec_isa import _get_isa_dry_compile_fingerprint

    return str(_get_isa_dry_compile_fingerprint(unit.build_arch_flags()))


@functools.cache
def _host() -> tuple[str, ...]:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    state = library.stat() if library.exists() else None
    return (
        f"{library} {state and (state.st_size, state.st_mtime_ns)}",
        sys.executable,
        sys.version,
        os.environ.get("LD_LIBRARY_PATH", ""),
        *platform.libc_ver(),
        platform.machine(),
        _cpu(),
    )


def _cpu() -> str:
    """Return what Linux says of the first processor that does not vary from one to the next, or as it runs."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        fixed = ("flags", "Features", "model name", "vendor_id", "stepping", "microcode", "CPU")
        return "\n".join(line for line in lines if line.startswith(fixed))
    return platform.processor()
