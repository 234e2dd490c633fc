"""The ranks that measure: those of a job that a launcher has started, or of one that starts here."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    ProcessRaisedException,
    spawn,
)

from inductor_passes.errors import CalibrationError, PassesError

CPU_RANKS = 2
SAID_WHY = 1  # exit code of a rank that has printed its error


def is_launched() -> bool:
    """Return whether torchrun, or another launcher with its variables, has started this process as one rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def chosen_device(name: str | None) -> str:
    """``cpu`` or ``cuda``: what was asked for, else what there is. Raises CalibrationError without CUDA."""
    if name == "cuda" and not torch.cuda.is_available():
        built = torch.version.cuda or "none: it was built for the CPU"
        raise CalibrationError(
            "There is no CUDA device here.",
            f"torch sees none; its own CUDA is {built}.",
            "Run nvidia-smi, look at CUDA_VISIBLE_DEVICES, or measure with --device cpu.",
        )
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def rank_count(device_type: str, wanted: int | None) -> int:
    """Return how many ranks start here: one per GPU, or two on a CPU. Raises CalibrationError for more than GPUs."""
    if device_type == "cpu":
        return wanted or CPU_RANKS
    there = torch.cuda.device_count()
    if wanted is not None and wanted > there:
        raise _too_few_gpus(f"{wanted} ranks were asked for", there)
    return wanted or there


def run_ranks(ranks: int, run: Callable[[], None], timeout_s: float, device_type: str) -> int:
    """Run ``run`` on ranks of this host, in processes of their own; 0, or 1 if one failed.

    ``run`` must be picklable. An error of ours is printed by the rank that has it.
    """
    with tempfile.TemporaryDirectory(prefix="calibrate_") as folder:
        arguments = (run, ranks, str(Path(folder) / "store"), timeout_s, device_type)
        try:
            spawn(_rank, arguments, nprocs=ranks)
        except ProcessExitedException as error:
            if error.exit_code != SAID_WHY:
                how = error.signal_name or f"exit code {error.exit_code}"
                print(f"error: rank {error.error_index} is gone ({how}).", file=sys.stderr)
            return 1
        except ProcessRaisedException as error:
            last = str(error).strip().splitlines()[-1]
            print(f"error: rank {error.error_index} failed: {last}", file=sys.stderr)
            return 1
    return 0


def _rank(
    rank: int, run: Callable[[], None], ranks: int, store: str, timeout_s: float, device_type: str
) -> None:
    if device_type == "cpu":
        torch.set_num_threads(1)
    if sys.platform == "linux":
        # A host name that does not resolve would stop gloo.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        with inside_job(device_type, timeout_s, rank, ranks, f"file://{store}"):
            run()
    except PassesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(SAID_WHY)


@contextlib.contextmanager
def inside_job(
    device_type: str,
    timeout_s: float,
    rank: int = -1,
    ranks: int = -1,
    init_method: str = "env://",
) -> Iterator[None]:
    """This process as a rank of the job, by the launcher's variables or those given; left afterwards.

    Raises CalibrationError without NCCL, where a host has fewer GPUs than ranks, where a rank does not come
    within ``timeout_s``, and where one is lost later.
    """
    backend = "gloo"
    if device_type == "cuda":
        backend = "nccl"
        if not dist.is_nccl_available():
            raise CalibrationError(
                "This torch has no NCCL.",
                "GPUs are joined by it.",
                "Install a build of torch with NCCL, or measure one GPU with --ranks 1.",
            )
        local, there = local_rank(rank), torch.cuda.device_count()
        if local >= there:
            raise _too_few_gpus(f"this is rank {local} of its host", there)
        torch.cuda.set_device(local)
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, init_method, timeout, ranks, rank)
    except (RuntimeError, ValueError) as error:
        raise CalibrationError(
            f"The ranks of the job did not come together within {timeout_s:.0f} s.",
            f"torch says: {_first_line(error)}",
            "Start the same line on every host, and see that MASTER_ADDR and the network interface "
            "(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) are right.",
        ) from error
    try:
        yield
    except PassesError:
        raise
    except RuntimeError as error:
        raise CalibrationError(
            f"Rank {dist.get_rank()} could not go on measuring: {_first_line(error)}",
            "Most often another rank has failed or is gone.",
            "Look for the error of the rank that failed first.",
        ) from error
    finally:
        dist.destroy_process_group()


def local_rank(rank: int = -1) -> int:
    """This process's number on its host, which is that of its GPU; ``rank`` where no launcher has said it."""
    return int(os.environ.get("LOCAL_RANK", max(rank, 0)))


def machine(device_type: str) -> str:
    """The device at hand, in words."""
    if device_type == "cuda":
        precision = torch.get_float32_matmul_precision()
        name = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
        return f"{name}, float32 products at precision {precision!r}"
    threads = torch.get_num_threads()
    return (
        f"{_cpu_name()}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} a rank, "
        f"load average {os.getloadavg()[0]:.1f}"
    )


def _cpu_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _too_few_gpus(why: str, there: int) -> CalibrationError:
    return CalibrationError(
        f"This host shows {there} GPU{'s' if there != 1 else ''}, but {why}.",
        "Each rank needs one of its own.",
        "Start as many ranks as there are GPUs (torchrun --nproc-per-node).",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
