"""Question: how much shorter is a step whose topology is wrong by four, once costs are imported
from a profile of it?

    python tools/bench/imported_costs.py --out tools/bench/results/imported_costs.json

Two real gloo ranks (root): two network namespaces, joined by a link that the kernel holds to a
rate. The topology is right but for one figure: ``rate/4`` says a quarter of the link's rate,
``floor*4`` that what a launch costs before bytes move takes four times as long, ``compute*4`` that
kernels are four times as fast. Some steps are profiled, in eager mode and compiled: so a gather is
seen alone, and in buckets. ``costs import`` adds what rank 0's profile shows to the wrong topology,
and the program is compiled again by that. Steps are timed by both in turn; ``ratio`` is of the
first deciles, as other programs only add time. ``clocked``: the ratio by clocks around each launch,
wait and product in the generated code, on all ranks, of an earlier version.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch.profiler import ProfilerActivity, profile

HERE = Path(__file__).resolve().parent
LAYERS, WIDTH, ROWS, RANKS = 12, 384, 512, 2
LINK, LINK_GB_PER_S = "1gbit", 0.125
CLOCKED = {"rate/4": 0.59, "floor*4": 0.738, "compute*4": 0.599}
PORT = 29721
STEPS, TURNS, PROFILED = 6, 12, 6


def main() -> None:
    """Run each case on fresh ranks; print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CLOCKED))
    parser.add_argument("--out", default="")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_of_job(Path(args.rank_of))
    cases = {case: on_two_hosts(case) for case in args.cases.split(",")}
    result = {
        "question": __doc__.splitlines()[0],
        "command": "python tools/bench/imported_costs.py",
        "kind": f"real processes, emulated link of {LINK}",
        "program": (
            f"{LAYERS} layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32, {ROWS} rows, "
            "without gradients"
        ),
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "cases": cases,
    }
    print(json.dumps(result, indent=1))
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def on_two_hosts(case: str) -> dict[str, Any]:
    """One case, on two hosts with a rank each."""
    sys.path.insert(0, str(HERE.parent / "demo"))
    from link import two_hosts

    with tempfile.TemporaryDirectory() as work, two_hosts(LINK) as hosts:
        write_topology(Path(work, "wrong.json"), case)
        ranks = []
        for rank, host in enumerate(hosts):
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "KINETO_LOG_LEVEL": "99",
                "TORCHINDUCTOR_CACHE_DIR": f"{work}/cache",
                "GLOO_SOCKET_IFNAME": host.interface,
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": str(PORT),
                "RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
            }
            command = ["ip", "netns", "exec", host.namespace, sys.executable, __file__]
            ranks.append(subprocess.Popen([*command, "--rank-of", work], env=environment))
        try:
            codes = [rank.wait(300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise SystemExit(f"{case}: ranks ended with {codes}")
        found = json.loads(Path(work, "out.json").read_text())
    return {**found, "clocked": CLOCKED.get(case), "load_average": os.getloadavg()[0]}


def write_topology(path: Path, case: str) -> None:
    """The shipped topology with two hosts and the link's rate, wrong as the case says."""
    from rescale import write_rescaled

    what, sign, number = re.split(r"([*/])", case)
    factor = float(number) ** (-1 if sign == "/" else 1)
    write_rescaled("cpu-gloo", path, name="wrong", compute=1 / factor if what == "compute" else 1)
    content = json.loads(path.read_text())
    links, rate = content["links"], LINK_GB_PER_S
    content["ranks_per_node"]["value"] = 1
    links["inter_node_gb_per_s"]["value"] = rate * factor if what == "rate" else rate
    for protocol in links["protocols"] if what == "floor" else ():
        protocol["launch_us"]["value"] *= factor
        for where in ("intra_node", "inter_node"):
            protocol[where]["step_us"]["value"] *= factor
    path.write_text(json.dumps(content))


def rank_of_job(work: Path) -> None:
    """One rank: steps by the wrong topology, a profile, steps by both in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from inductor_passes.__main__ import main as passes
    from inductor_passes.testing import leave_process

    torch.manual_seed(dist.get_rank())
    weights = [torch.rand(WIDTH // RANKS, WIDTH) / WIDTH for _ in range(LAYERS)]
    x = torch.rand(ROWS, WIDTH)

    def step() -> torch.Tensor:
        value = x
        for shard in weights:
            value = torch.relu(value @ fc.all_gather_tensor_autograd(shard, 0, dist.group.WORLD))
        return value.sum()

    wrong, launches_before = compiled(step, work / "wrong.json")
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for run in [step, wrong] * PROFILED:
            dist.barrier()
            with torch.no_grad():
                run()
    if dist.get_rank() == 0:
        profiler.export_chrome_trace(f"{work}/trace.json")
        command = ["costs", "import", f"{work}/trace.json", "--topology", f"{work}/wrong.json"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert passes([*command, "-o", f"{work}/imported.json"]) == 0
    dist.barrier()
    imported, launches_after = compiled(step, work / "imported.json")
    before, after = [], []
    for _ in range(TURNS):
        before += timed(wrong)
        after += timed(imported)
    if dist.get_rank() == 0:
        (fast, median), (fast_after, median_after) = map(decile_and_median, (before, after))
        result = {
            "ratio": round(fast_after / fast, 3),
            "ratio_of_medians": round(median_after / median, 3),
            "before_ms": [fast, median],
            "after_ms": [fast_after, median_after],
            "launches_before": launches_before,
            "launches_after": launches_after,
        }
        (work / "out.json").write_text(json.dumps(result))
    dist.barrier()
    leave_process()


def compiled(step: Callable[[], torch.Tensor], topology: Path) -> tuple[Callable[[], object], int]:
    """The step scheduled for a topology, and how many launches it has."""
    from inductor_passes.report import recorder

    # Dynamo keeps what it has compiled by code: each topology needs code of its own.
    named = step.__code__.replace(co_name=topology.stem)
    own = type(step)(named, step.__globals__, topology.stem, None, step.__closure__)
    run = torch.compile(own, backend="dynamo_dist", options={"topology": str(topology)})
    records: list[Any] = []
    stop = recorder.subscribe(records.append)
    with torch.no_grad():
        for _ in range(4):
            run()
    stop()
    return run, len(records[-1].collectives)


def timed(run: Callable[[], object]) -> list[float]:
    """Milliseconds of steps that both ranks begin together; three more go ahead of them."""
    found = []
    for _ in range(3 + STEPS):
        dist.barrier()
        start = time.perf_counter()
        with torch.no_grad():
            run()
        found.append(1e3 * (time.perf_counter() - start))
    return found[3:]


def decile_and_median(values: list[float]) -> tuple[float, float]:
    """The first decile, and the median."""
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return round(deciles[0], 2), round(deciles[4], 2)


if __name__ == "__main__":
    main()
