"""Programs on real gloo ranks: jobs that run one behind the other, each of new processes behind a
program that it did not survive.

This file is also the script of a rank: ``python ranks.py FOLDER PART SIDE SECONDS PROGRAM...``. A
rank writes the end of each program to the folder, and leaves with status 3 after one that ranks
ended otherwise than each other.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import logging
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import preloaded
import torch
import torch.distributed as dist
from comparison.outcome import End, end_of
from comparison.part import Part

JOB_S = 1500
# Of what ranks say, what the program comes to.
WORST_FIRST = ("unfit", "hang", "crash", "error", "wrong", "refuses", "breaks")


def run(part: Part, names: list[str], side: str, seconds: float) -> Iterator[tuple[str, End]]:
    """Each program with its end; programs on equally many ranks share jobs."""
    ranks_of = {name: torch.Size(part.load().mesh_of(part.name, name)).numel() for name in names}
    for ranks in sorted(set(ranks_of.values())):
        left = [name for name in names if ranks_of[name] == ranks]
        while left:
            ended = _job(part, left, side, seconds, ranks)
            yield from ended.items()
            left = [name for name in left if name not in ended]


def _job(part: Part, names: list[str], side: str, seconds: float, ranks: int) -> dict[str, End]:
    """The ends of the programs that one job came to, at least of the first."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        variables = {
            "OMP_NUM_THREADS": "1",
            "INDUCTOR_PASSES_AGREEMENT_SECONDS": "10",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
        }
        arguments = [made, part.name, side, str(seconds), *names]
        _, log = preloaded.run_ranks(
            Path(__file__), ranks, arguments, variables, folder=folder, timeout_s=JOB_S
        )
        if os.environ.get("PARITY_LOUD"):
            print(log, file=sys.stderr)
        ended: dict[str, End] = {}
        for name in names:
            paths = [_path(folder, name, rank) for rank in range(ranks)]
            said = [End.from_json(json.loads(p.read_text())) for p in paths if p.exists()]
            if len(said) < ranks:
                # Of several programs that have no end the job was in the first.
                if said or not ended or f"-- {name}\n" in log:
                    ended[name] = merged([*said, End("crash", "the process died")])
                break
            ended[name] = merged(said)
        return ended


def merged(ends: list[End]) -> End:
    """What the ends on all ranks come to. What not all of them refuse is an error."""
    if {end.status for end in ends} > {"refuses"}:
        ends = [
            End("error", end.why, truth=end.truth) if end.status == "refuses" else end
            for end in ends
        ]
    return min(ends, key=lambda end: [*WORST_FIRST, end.status].index(end.status))


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.{rank}.json"


def main() -> None:
    """Be one rank: run the programs that are named, one behind the other."""
    from comparison.in_graphs._torch import forget
    from comparison.parts import PARTS

    folder, part, side, limit, *names = Path(sys.argv[1]), *sys.argv[2:]
    seconds, module = float(limit), PARTS[part].load()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=0.6 * seconds))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if side == "ours":
        import dynamo_dist

        dynamo_dist.enable()
    ended = dist.FileStore(str(folder / f"ended{os.environ['MASTER_PORT']}"), ranks)
    ended.set_timeout(datetime.timedelta(seconds=seconds + 5))
    gc.collect()
    gc.freeze()
    gc.disable()
    for name in names:
        print(f"-- {name}", flush=True)
        over = threading.Timer(seconds, _give_up, [_path(folder, name, rank), seconds])
        over.daemon = True
        over.start()
        forget()
        try:
            torch.manual_seed(0)
            end = module.on_rank(part, name, side, rank)
        except BaseException as error:
            traceback.print_exc()
            end = end_of(error)
        over.cancel()
        _path(folder, name, rank).write_text(json.dumps(end.to_json()))
        ended.set(f"{name}{rank}", f"{end.status} {end.why[:80]}")
        others: set[bytes] = set()
        with contextlib.suppress(Exception):  # one of them has died or hangs
            others = {ended.get(f"{name}{other}") for other in range(ranks)}
        if len(others) != 1 or b"imed out" in next(iter(others)):
            os._exit(3)
    os._exit(0)


def _give_up(path: Path, seconds: float) -> None:
    path.write_text(json.dumps(End("hang", f"no end after {seconds:g} s").to_json()))
    os._exit(3)


if __name__ == "__main__":
    main()
