"""The demo: a small Llama trained on two ranks, eager, stock Inductor and dynamo_dist side by side.

``bash tools/demo.sh`` installs what is needed and calls this. Exit code 0: one graph, and every loss
within 1e-5 of eager's; 1: not so, or a rank failed; 2: this machine cannot do what was asked.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import fields
from pathlib import Path

import data
import launch
import show

HERE = Path(__file__).resolve().parent
RANKS = 2
DEFAULT_TOPOLOGY = "h100x8"


def main() -> int:
    """Parse the command line and run what it asks for."""
    args = parse(sys.argv[1:])
    with launch.terminated_like_interrupt():
        try:
            if args.fake:
                import fake

                return fake.run(args)
            if args.link:
                import link

                return link.run(args)
            return train(args)
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
        "--topology", default=DEFAULT_TOPOLOGY, help="what the simulated figures are for"
    )
    parser.add_argument("--deadline", type=float, default=1200, help="seconds before giving up")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a rank waits for another")
    group = parser.add_argument_group("training on two real ranks (the default)")
    group.add_argument("--steps", type=int, default=20)
    for field in fields(data.Sizes):
        group.add_argument(f"--{field.name}", type=int, default=field.default)
    group = parser.add_argument_group("two hosts on a slow link (needs root)")
    group.add_argument("--link", metavar="RATE", help="rate for tc tbf, such as 1gbit")
    group.add_argument("--rounds", type=int, default=12, help="timed rounds of each variant")
    group = parser.add_argument_group("a large model on fake ranks, traced and not run")
    group.add_argument("--fake", action="store_true")
    group.add_argument("--world-size", type=int, default=64)
    group.add_argument("--tp", type=int, default=8, help="ranks that share each weight")
    group.add_argument("--model", default="llama3-8b")
    group.add_argument("--seq", type=int, default=8192, help="tokens a rank sees in a step")
    args = parser.parse_args(argv)
    if args.steps < 1 or args.layers < 1 or args.rounds < 1:
        parser.error("--steps, --layers and --rounds are at least 1")
    if args.hidden % (16 * data.HEADS):
        parser.error(f"--hidden must be a multiple of {16 * data.HEADS}")
    return args


def train(args: argparse.Namespace) -> int:
    """Write the checkpoint, run both ranks, show what they measured."""
    sizes = data.Sizes(args.layers, args.hidden, args.batch, args.sequence)
    out = Path(args.out).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: --out {out} cannot be made: {error}", file=sys.stderr)
        return 2
    work = Path(tempfile.mkdtemp(prefix="dynamo_dist_demo_"))
    try:
        print(f"{sizes}: writing a random checkpoint ...", file=sys.stderr, flush=True)
        parameters = data.write_checkpoint(work / "checkpoint", sizes)
        print(f"starting {RANKS} ranks (gloo, CPU) ...", file=sys.stderr, flush=True)
        arguments = ["--work", str(work), "--report", str(out), "--topology", args.topology]
        arguments += ["--steps", str(args.steps), "--timeout", str(args.timeout)]
        for field in fields(data.Sizes):
            arguments += [f"--{field.name}", str(getattr(sizes, field.name))]
        environment = data.environment()
        if sys.platform == "linux":
            # A host name that does not resolve would stop gloo.
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = launch.torchrun(HERE / "train.py", arguments, RANKS)
        launch.watch([command], [environment], work, args.deadline)
        ranks = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    finally:
        shutil.rmtree(work, ignore_errors=True)
    results = show.training_results(ranks, sizes, parameters, out)
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show.training(results)
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
