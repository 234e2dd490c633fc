"""How long does torch's gloo hold out with several collectives in flight over a slow link? No plugin.

Two ranks in network namespaces, joined by a link held to a rate (tc tbf; needs root), launch gathers and
reduce-scatters of 64 to 672 KiB, up to nine at once, and wait for them a little out of order. torch 2.13's
gloo spoils its heap now and then: the process ends with "malloc(): unaligned tcache chunk detected", signal
6. Whoever overlaps collectives on gloo can meet it, whatever launched them. It is a race, and may not show.

usage: gloo_race.py [--link 1gbit] [--seconds 300] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "demo"))
ROWS = (64, 128, 256, 257, 466, 672)
WIDTH = 256
IN_FLIGHT = (2, 5, 9)
PER_ROUND, ROUNDS = 30, 50


def main() -> int:
    """Start the ranks and say how many collectives went through before one ended, if one did."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--out", default="")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # given to a rank
    args = parser.parse_args()
    if args.work:
        rank(Path(args.work), args.seconds)
        return 0
    import launch
    import link

    with (
        tempfile.TemporaryDirectory(prefix="gloo_race_") as folder,
        link.two_hosts(args.link) as hosts,
    ):
        ended = ""
        command = [__file__, "--work", folder, "--seconds", str(args.seconds)]
        try:
            link.run_ranks(hosts, command, Path(folder), args.seconds + 120, 1)
        except launch.RanksFailed as error:
            ended = str(error)
        counted = Path(folder) / "collectives"
        result = {
            "question": __doc__.splitlines()[0],
            "label": f"{link.LABEL}, {args.link}",
            "torch": torch.__version__,
            "collectives": int(counted.read_text()) if counted.exists() else 0,
            "ended": ended,
        }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def rank(work: Path, seconds: float) -> None:
    """One rank: rounds of collectives until the time is over, counted in a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (work / f"rank{dist.get_rank()}.pid").write_text(str(os.getpid()))
    group, ops = dist.group.WORLD.group_name, torch.ops._c10d_functional
    draw = random.Random(0)  # the same on both ranks
    product, end, rounds = torch.randn(WIDTH, WIDTH), time.monotonic() + seconds, 0
    over = torch.zeros(1)
    while not over.item():
        for _ in range(ROUNDS):
            flying: list[tuple[torch.Tensor, torch.Tensor]] = []
            for _ in range(PER_ROUND):
                rows = draw.choice(ROWS)
                if draw.random() < 0.5:
                    sent = torch.ones(2 * rows, WIDTH)
                    flying.append((ops.reduce_scatter_tensor(sent, "sum", 2, group), sent))
                else:
                    sent = torch.ones(rows, WIDTH)
                    flying.append((ops.all_gather_into_tensor(sent, 2, group), sent))
                if draw.random() < 0.7:
                    product = torch.mm(product, product) * 0.01
                while len(flying) > draw.choice(IN_FLIGHT):
                    ops.wait_tensor(flying.pop(draw.randrange(min(3, len(flying))))[0])
            for received, _ in flying:
                ops.wait_tensor(received)
        rounds += ROUNDS
        if dist.get_rank() == 0:
            (work / "collectives").write_text(str(rounds * PER_ROUND))
        over.fill_(float(time.monotonic() > end))
        dist.all_reduce(over)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
