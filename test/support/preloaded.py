"""Processes that start with torch imported: forks of one that has imported it and done nothing
else.

Importing torch and its compiler takes a process seconds, and a run of programs starts many. Ranks
of a script start with more: this package imported, which changes nothing, and what the first
compile of a process makes for all others (``first_compile.py``).
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Nothing that computes, starts threads, or changes torch.
MODULES = [
    "torch",
    "torch._dynamo.backends.common",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor.parallel",
]
# Once each, in the first process that a fork of the server needs them for; ranks of a script do.
FOR_RANKS = [*MODULES, "first_compile"]
# What glibc says of memory that was freed twice, before it ends the process.
SPOILT_HEAP = re.compile(r"malloc\(\): |free\(\): |tcache|corrupted")
# Read when torch is imported, and no more in a fork: Inductor's own processes would be copied with
# it, and where ranks are more than cores, OpenMP's threads spend most of the time waiting for one
# another.
VARIABLES = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}


def context(modules: Sequence[str] = MODULES) -> ForkServerContext:
    """Return the context that starts such processes; their ``os.environ``, and their modules,
    are those of its first use.
    """
    chosen = multiprocessing.get_context("forkserver")
    chosen.set_forkserver_preload([*modules])
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with mock.patch.dict(
        os.environ, VARIABLES | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ):
        forkserver.ensure_running()
    return chosen


def time_no_guards() -> None:
    """Leave out of this process's compiles that Dynamo times each frame's guards, with the
    processor's caches emptied before, for its log.
    """
    from torch._dynamo import guards

    guards.profile_guard_manager = lambda *_: 0.0


def run_ranks(
    worker: Path,
    ranks: int,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    folder: Path,
    timeout_s: float,
    again: bool = True,
) -> tuple[bool, str]:
    """Run a script on ranks of this host, as ``torchrun`` would; return whether all ended well, and
    what they said.

    ``variables`` are set over this process's own. What a rank writes is kept in ``folder``. Once a
    rank fails, or the time is over, the others are ended. A rank that gloo's heap ended
    (``bench/soak.py``) says nothing of the script: all run once more then (``again``), and once
    only.
    """
    well, said = _run_ranks(worker, ranks, arguments, variables, folder, timeout_s)
    if again and not well and "exit status -6\n" in said and SPOILT_HEAP.search(said):
        print(f"{worker.name}: a rank's heap was spoilt, as gloo does; once more", file=sys.stderr)
        well, said = _run_ranks(worker, ranks, arguments, variables, folder, timeout_s)
    return well, said


def _run_ranks(
    worker: Path,
    ranks: int,
    arguments: Sequence[str],
    variables: Mapping[str, str] | None,
    folder: Path,
    timeout_s: float,
) -> tuple[bool, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "GLOO_SOCKET_IFNAME": "lo"}
    sizes = {"WORLD_SIZE": f"{ranks}", "LOCAL_WORLD_SIZE": f"{ranks}"}
    processes: list[BaseProcess] = []
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    for rank, log in enumerate(logs):
        log.unlink(missing_ok=True)
        own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
        environment = {**os.environ, **job, **sizes, **(variables or {}), **own}
        process = context(FOR_RANKS).Process(
            target=as_script,
            args=(str(worker), list(arguments), environment, str(log), str(log), str(Path.cwd())),
        )
        process.start()
        processes.append(process)
    try:
        end = time.monotonic() + timeout_s
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                time.sleep(1.0)  # for the others to say what they saw of it
                break
            time.sleep(0.1)
        well = all(process.exitcode == 0 for process in processes)
        ends = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    said = [
        f"-- rank {rank}, {'killed' if status is None else f'exit status {status}'}\n{log.read_text()}"
        for rank, (status, log) in enumerate(zip(ends, logs, strict=True))
    ]
    return well, "\n".join(said)


def as_script(
    worker: str, arguments: list[str], variables: dict[str, str], out: str, errors: str, cwd: str
) -> None:
    """Become a process that runs a script; ``out`` and ``errors`` are files, and may be one.

    It computes with one thread, or with as many as ``OMP_NUM_THREADS`` says.
    """
    os.chdir(cwd)
    for stream, name in ((1, out), (2, errors)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    if (threads := variables.get("OMP_NUM_THREADS", "")).isdecimal():
        import torch

        torch.set_num_threads(int(threads))
    sys.argv = [worker, *arguments]
    added = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:0] = [str(Path(worker).resolve().parent), *added]
    runpy.run_path(worker, run_name="__main__")
