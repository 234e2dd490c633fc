"""The demo: a small Llama trained on two ranks, eager, upstream Inductor and dynamo_dist side by
side.

``bash tools/demo.sh`` installs what is needed and calls this. Exit code 0: one graph, and every
loss within 1e-5 of eager's; 1: not so, or a rank failed; 2: this machine cannot do what was asked.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields

import data
import launch

DEFAULT_TOPOLOGY = "h100x8"


def main() -> int:
    """Parse the command line and run what it asks for."""
    args = parse(sys.argv[1:])
    with launch.terminated_like_interrupt():
        try:
            if args.link:
                import link

                return link.run(args)
            import training

            return training.run(args)
        except launch.RanksFailed as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("stopped", file=sys.stderr)
            return 130


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="demo.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument("--out", default="demo_out", help="folder for report and trace")
    parser.add_argument(
        "--topology",
        default=DEFAULT_TOPOLOGY,
        help=(
            "what the simulated figures are for; with --link the machine and the link are measured"
        ),
    )
    parser.add_argument("--deadline", type=float, default=1200, help="seconds before giving up")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a rank waits for another")
    group = parser.add_argument_group("training on two real ranks (the default)")
    group.add_argument("--steps", type=int, default=20)
    group.add_argument(
        "--parallel",
        choices=tuple(data.PARALLEL),
        default="tensor",
        help="what two ranks share: each weight's product, or the batch, by "
        "torch's fully_shard; both: four ranks",
    )
    group.add_argument(
        "--memory",
        nargs="+",
        default=[],
        metavar="BUDGET",
        help="train beside the three within each of these memory budgets, such as 24MiB",
    )
    for field in fields(data.Sizes):
        group.add_argument(f"--{field.name}", type=int, default=field.default)
    group = parser.add_argument_group("two hosts on a slow link (needs root)")
    group.add_argument("--link", metavar="RATE", help="rate for tc tbf, such as 1gbit")
    group.add_argument(
        "--train", action="store_true", help="train the Llama over the link, not a chain of gathers"
    )
    group.add_argument(
        "--alone",
        help="file with what a step takes without a link; with --train, made if it is not there",
    )
    group.add_argument("--rounds", type=int, default=12, help="timed rounds of the chain")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.layers < 1 or args.rounds < 1:
        parser.error("--steps, --layers and --rounds are at least 1")
    if args.hidden % (16 * data.HEADS):
        parser.error(f"--hidden must be a multiple of {16 * data.HEADS}")
    return args


if __name__ == "__main__":
    sys.exit(main())
