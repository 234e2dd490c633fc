"""Question: what does gloo put on the link for a reduce_scatter, and how long does it take beside an exchange and a sum? No plugin.

    python tools/bench/gloo_scatter.py --write tools/bench/results/gloo_scatter.json

Real gloo ranks on the loopback, one thread each, in turns. Bytes are those of all ranks by the kernel's counter, which
also counts what others send on the loopback meanwhile. Milliseconds are medians of rank 0, on a machine with fewer cores
than ranks and their threads: ratios say something, times do not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from preloaded import run_ranks

RANKS = (2, 4)
KIB = (64, 1024, 16384)
ROUNDS = 12


def rank_of_a_job(out: Path) -> None:
    """Measure on this rank; rank 0 writes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, rows = dist.get_world_size(), []
    for kib in KIB:
        whole = torch.randn(kib * 256)
        part, taken = torch.empty(whole.numel() // ranks), torch.empty_like(whole)

        done = {
            "reduce_scatter": lambda p=part, w=whole: dist.reduce_scatter_tensor(p, w),
            "all_reduce": lambda w=whole: dist.all_reduce(w),
            "exchange": lambda p=part, w=whole, t=taken: _exchange(p, w, t),
        }
        found = {name: _measured(call) for name, call in done.items()}
        rows.append({"ranks": ranks, "payload_bytes": whole.nbytes, **found})
    if dist.get_rank() == 0:
        out.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _exchange(part: torch.Tensor, whole: torch.Tensor, taken: torch.Tensor) -> None:
    dist.all_to_all_single(taken, whole)
    torch.sum(taken.view(dist.get_world_size(), -1), 0, out=part)


def _measured(call: Callable[[], object]) -> dict[str, float]:
    call()
    dist.barrier()
    before, times = _loopback_bytes(), []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    dist.barrier()
    sent = (_loopback_bytes() - before) / ROUNDS
    return {"ms": round(statistics.median(times), 3), "bytes": round(sent)}


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split()[1])


def main() -> int:
    """Start the ranks, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE")
    parser.add_argument("--of-rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.of_rank:
        rank_of_a_job(options.of_rank)
        return 0
    rows = []
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            arguments = ("--of-rank", str(out))
            well, said = run_ranks(
                Path(__file__), ranks, arguments, folder=Path(folder), timeout_s=300
            )
            if not well:
                print(said, file=sys.stderr)
                return 1
            rows += json.loads(out.read_text())
    for row in rows:
        slow, quick = row["reduce_scatter"], row["exchange"]
        print(
            f"{row['ranks']} ranks, {row['payload_bytes'] >> 10} KiB: reduce_scatter {slow['bytes'] / row['payload_bytes']:.2f} "
            f"payloads on the link, exchange {quick['bytes'] / row['payload_bytes']:.2f}; {slow['ms'] / quick['ms']:.2f} times as long"
        )
    if options.write:
        result = {"question": __doc__.split("\n")[0], "torch": torch.__version__, "rows": rows}
        options.write.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
