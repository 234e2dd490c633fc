"""Question: what does ``dynamo_dist.tune`` make of a topology that is wrong, or of a slow link, and how good are predictions after it?

    python tools/bench/tuned.py --cases shipped,rate,floor,compute --out tools/bench/results/tuned.json
    python tools/bench/tuned.py --links 200mbit,1gbit,5gbit --ranks 2,4 --out tools/bench/results/tuned.json

Real processes on gloo. Without ``--links`` they are joined by this host's loopback, and the shipped topology is as it is, or its
rates of links, its floors or its compute are ``--wrong`` times what they were. With it (root) they are two hosts, network
namespaces joined by a link that the kernel holds to a rate, which the shipped topology knows nothing of. Of each, steps are
timed untuned, tuned, untuned and tuned again, ``--rounds`` each time, so that what else the machine does is seen; ratios are
of the medians. Errors are of the predicted time of all compiled graphs on steps that no cost is from. ``others``: cores that
other programs took meanwhile; what more than ``--spoilt`` of them were taken from is run again by the next call.

A call begins nothing after ``--seconds``, and keeps in ``--out`` what is there: so it runs in slices.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

HERE = Path(__file__).resolve().parent
WIDTH, ROWS = 512, 512
PROGRAMS = {
    "gathered": f"6 layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32, {ROWS} rows, trained",
    "gathered, inference": f"12 such layers, {ROWS} rows, without gradients",
    "tensor parallel": f"4 blocks of x + all_reduce(relu(x @ a) @ b), {2 * WIDTH} inner columns in all, {ROWS} rows, trained",
}
BASE = "cpu-gloo"
LOOPBACK = "loopback"
PORT = 29640
DEADLINE_S = 170.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One job: ``case`` of the topology, ``link`` between its hosts, a program and so many ranks."""

    case: str
    link: str
    program: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.program}, {self.ranks} ranks, {self.link}, {self.case}"


def main() -> int:
    """Run what is not in the file yet, or was spoilt; print, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="shipped", help="shipped, rate, floor, compute")
    parser.add_argument("--links", default=LOOPBACK)
    parser.add_argument("--programs", default="gathered", help=f"or all: {'; '.join(PROGRAMS)}")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=16, help="steps in each of four stretches")
    parser.add_argument("--wrong", type=float, default=4.0)
    parser.add_argument("--spoilt", type=float, default=0.3)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--again", action="store_true", help="also what is in the file")
    parser.add_argument("--out", default="")
    parser.add_argument("--rank-of", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        return rank_of_job(json.loads(args.rank_of))
    start = time.monotonic()
    programs = list(PROGRAMS) if args.programs == "all" else args.programs.split(";")
    jobs = [
        Job(case, link, program.strip(), int(ranks))
        for link in args.links.split(",")
        for ranks in args.ranks.split(",")
        for program in programs
        for case in args.cases.split(",")
    ]
    results = read(args.out) or {
        "label": "real processes, loopback or an emulated link",
        "programs": PROGRAMS,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "wrong": args.wrong,
        "jobs": {},
    }
    for job in jobs:
        known = results["jobs"].get(str(job))
        if known and not args.again and known.get("others", 9.0) <= args.spoilt:
            continue
        if time.monotonic() - start > args.seconds:
            print(f"left for the next call: {job}")
            continue
        found = run(job, args.rounds, args.wrong)
        if not known or "others" not in known or found.get("others", 9.0) <= known["others"]:
            results["jobs"][str(job)] = found
        print(job, json.dumps(found), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def read(path: str) -> dict[str, Any] | None:
    """What an earlier call wrote, of this form."""
    if not path or not Path(path).exists():
        return None
    found = json.loads(Path(path).read_text())
    return found if "jobs" in found else None


def run(job: Job, rounds: int, wrong: float) -> dict[str, Any]:
    """One job on fresh ranks, with a cache of its own."""
    with tempfile.TemporaryDirectory() as work, hosts(job.link) as places:
        given = {
            **dataclasses.asdict(job),
            "rounds": rounds,
            "topology": topology(Path(work), job.case, wrong),
            "out": str(Path(work) / "out.json"),
        }
        ranks = []
        for rank in range(job.ranks):
            prefix, interface, address = places[rank * len(places) // job.ranks]
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": f"{work}/cache",
                "GLOO_SOCKET_IFNAME": interface,
                "MASTER_ADDR": address,
                "MASTER_PORT": str(PORT),
                "RANK": str(rank),
                "WORLD_SIZE": str(job.ranks),
            }
            command = [*prefix, sys.executable, __file__, "--rank-of", json.dumps(given)]
            ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
        end = time.monotonic() + DEADLINE_S
        try:
            while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
                if any(rank.returncode for rank in ranks):
                    break
                time.sleep(0.2)
        finally:
            for rank in ranks:
                rank.kill()
            said = [rank.communicate()[1].decode()[-600:] for rank in ranks]
        if not Path(given["out"]).exists():
            return {"failed": said}
        return json.loads(Path(given["out"]).read_text())


@contextlib.contextmanager
def hosts(link: str) -> Iterator[list[tuple[list[str], str, str]]]:
    """Of each host: what stands before a command that runs there, its interface, and the address at which ranks meet."""
    if link == LOOPBACK:
        yield [([], "lo", "127.0.0.1")]
        return
    sys.path.insert(0, str(HERE.parent / "demo"))
    from link import two_hosts

    with two_hosts(link) as two:
        yield [
            (["ip", "netns", "exec", host.namespace], host.interface, two[0].address)
            for host in two
        ]


def topology(work: Path, case: str, wrong: float) -> str:
    """The shipped topology's name, or the path of one that says a part of the machine is ``wrong`` times what it is there."""
    from inductor_passes.machine.topology.rescale import write_rescaled
    from inductor_passes.machine.topology.topology import topology_text

    if case == "shipped":
        return BASE
    path = work / f"wrong_{case}.json"
    if case == "compute":
        write_rescaled(BASE, path, name=f"wrong-{case}", compute=1 / wrong)
        return str(path)
    content = json.loads(topology_text(BASE))
    content["name"] = f"wrong-{case}"
    links = content["links"]
    if case == "rate":
        links["intra_node_gb_per_s"]["value"] *= wrong
    for protocol in links["protocols"] if case == "floor" else ():
        protocol["launch_us"]["value"] *= wrong
        protocol["intra_node"]["step_us"]["value"] *= wrong
    path.write_text(json.dumps(content))
    return str(path)


def step_of(program: str, ranks: int, topology: str) -> Any:
    """One step of a program on this rank."""
    options, x = {"topology": topology}, torch.rand(ROWS, WIDTH)
    if program == "tensor parallel":
        inner = 2 * WIDTH // ranks
        weights = [
            (torch.rand(shape) / WIDTH).requires_grad_()
            for _ in range(4)
            for shape in ((WIDTH, inner), (inner, WIDTH))
        ]
    else:
        layers = 12 if "inference" in program else 6
        weights = [
            (torch.rand(WIDTH // ranks, WIDTH) / WIDTH).requires_grad_() for _ in range(layers)
        ]

    def gathered() -> torch.Tensor:
        value = x
        for shard in weights:
            value = torch.relu(value @ fc.all_gather_tensor_autograd(shard, 0, dist.group.WORLD))
        return value.sum()

    def tensor_parallel() -> torch.Tensor:
        value = x
        for a, b in zip(weights[::2], weights[1::2], strict=True):
            part = torch.relu(value @ a) @ b
            value = value + fc.all_reduce(part, "sum", dist.group.WORLD)
        return value.sum()

    loss = tensor_parallel if program == "tensor parallel" else gathered
    compiled = torch.compile(loss, backend="dynamo_dist", options=options)

    def infer() -> None:
        with torch.no_grad():
            compiled()

    def train() -> None:
        compiled().backward()
        for weight in weights:
            weight.grad = None

    return infer if "inference" in program else train


def rank_of_job(job: dict[str, Any]) -> int:
    """One rank of one job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import dynamo_dist
    from dynamo_dist.tuning import codes
    from dynamo_dist.tuning import report as tuning
    from dynamo_dist.tuning.findings import error_of
    from dynamo_dist.tuning.meetings import Meetings
    from inductor_passes.agree import orders
    from inductor_passes.attach import measured
    from inductor_passes.testing import leave_process

    torch.manual_seed(dist.get_rank())
    rounds = job["rounds"]
    step = step_of(job["program"], job["ranks"], job["topology"])
    for _ in range(4):
        step()
    stretches: list[list[float]] = []
    launches: list[list[int]] = []
    graphs: list[list[Any]] = []  # of each stretch: phase, predicted and measured ms of each graph
    errors = []

    def time_steps(name: str, tables: Any) -> None:
        if tables is not None:
            switch = Meetings(orders.current(), f"bench/{name}")
            switch.before = {}
            switch.switch(tables)
        for _ in range(3):
            step()
        clocks = codes.Clocks()
        clocks.start("scheduled")
        stretches.append(timed(step, rounds))
        clocks.stop("scheduled")
        errors.append(error_of(clocks))
        launches.append([len(record.collectives) for record in clocks.records()])
        ms = {graph: statistics.median(us) / 1e3 for graph, us in clocks.us("scheduled").items()}
        graphs.append(
            [
                [r.phase, round(r.after.makespan_us / 1e3, 2), round(ms[r.graph], 2)]
                for r in clocks.records()
            ]
        )

    # Whatever steps became is measured here in turn, also what would be put back.
    tuning.NOISE, noise = float("inf"), tuning.NOISE
    clock = Busy()
    time_steps("untuned", None)
    report = dynamo_dist.tune(step, steps=max(4, rounds))
    tables = dict(measured.adopted())
    for name, wanted in (("tuned", tables), ("untuned again", {}), ("tuned again", tables)):
        time_steps(name, wanted)
    others = clock.others()
    if dist.get_rank() == 0:
        before, after = stretches[0] + stretches[2], stretches[1] + stretches[3]
        found = {
            "left": report.why,
            "would_be_put_back": report.after_us > noise * report.before_us,
            "before_ms": quartiles(before),
            "after_ms": quartiles(after),
            "ratio": round(statistics.median(after) / statistics.median(before), 3),
            "medians_in_turn_ms": [round(statistics.median(each), 3) for each in stretches],
            "launches_before": launches[0],
            "launches_after": launches[1],
            "graphs_in_turn_predicted_and_measured_ms": graphs,
            "prediction_error_before": round(statistics.mean(errors[::2]), 4),
            "prediction_error_after": round(statistics.mean(errors[1::2]), 4),
            "recompiles": report.recompiles,
            "recompile_s": round(report.recompile_s, 2),
            "compute_stretch": round(report.compute_stretch, 3),
            "launch_stretch": round(report.launch_stretch, 3),
            "others": round(others, 2),
            "load_average": os.getloadavg()[0],
        }
        Path(job["out"]).write_text(json.dumps(found))
    dist.barrier()
    leave_process()
    return 0


class Busy:
    """Cores that others took since it was made: what the kernel says was busy, less what the ranks of this job took."""

    def __init__(self) -> None:
        self._start = self._now()

    def _now(self) -> tuple[float, float, float]:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
        own = os.times()
        busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, own.user + own.system

    def others(self) -> float:
        """Their share, in cores; every rank calls it."""
        (t0, b0, o0), (t1, b1, o1) = self._start, self._now()
        own = torch.tensor(o1 - o0, dtype=torch.float64)
        dist.all_reduce(own)
        return max(0.0, (b1 - b0 - own.item()) / (t1 - t0))


def timed(step: Any, rounds: int) -> list[float]:
    """Milliseconds of steps that all ranks begin together."""
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def quartiles(values: list[float]) -> list[float]:
    """The three quartiles."""
    return [round(q, 3) for q in statistics.quantiles(values, n=4, method="inclusive")]


if __name__ == "__main__":
    sys.exit(main())
