"""Question: what does ``dynamo_dist.tune`` make of a topology that is wrong, or of a slow link, and how good are predictions after it?

    python tools/bench/tuned.py --links 200mbit,1gbit,5gbit --ranks 2,4 --programs all --out tools/bench/results/tuned.json
    python tools/bench/tuned.py --links 1gbit --programs narrow --out tools/bench/results/tuned.json \\
        --cases right,rate/4,floor*4,compute*4,rate*4,floor/4,compute/4

Real processes on gloo. Without ``--links`` they are joined by this host's loopback; with it (root) they are two hosts, network
namespaces joined by a link that the kernel holds to a rate. The topology is the shipped one, which has all ranks on one
host and knows nothing of the link; or ``right``, with two hosts and the link's rate; or as right but for one figure: ``rate/4`` says a quarter of
the link's rate, ``floor*4`` that what a launch costs before bytes move takes four times as long, ``compute*4`` that kernels are
four times as fast. Steps are timed untuned and tuned in turn, ``--turns`` times ``--rounds`` each; ratios are
of the medians, and ``spread`` is how far the medians of stretches that ran the same schedule are apart. ``decision``: what ``tune`` would have
done with what is timed here in any case. Errors are of the predicted time of all compiled graphs on steps that no cost is from.
``others``: cores that other programs took meanwhile; what more than ``--spoilt`` of them were taken from is run again by the next call.
``crashes``: how often gloo spoilt its heap (``gloo_race.py``), and the job began again.

A call begins nothing after ``--seconds``, and keeps in ``--out`` what is there: so it runs in slices.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc

from inductor_passes.machine.times.times import LaunchTime, NodeTime, Times
from inductor_passes.records import GraphRecord

HERE = Path(__file__).resolve().parent
WIDTH, NARROW, ROWS = 512, 384, 512
PROGRAMS = {
    "gathered": f"6 layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32, {ROWS} rows, trained",
    "gathered, inference": f"12 such layers, {ROWS} rows, without gradients",
    "narrow": f"12 layers of relu(x @ gather(w)), w {NARROW} x {NARROW} fp32, {ROWS} rows, without gradients",
    "tensor parallel": f"4 blocks of x + all_reduce(relu(x @ a) @ b), {2 * WIDTH} inner columns in all, {ROWS} rows, trained",
}
BASE = "cpu-gloo"
LOOPBACK = "loopback"
PORT = 29640
DEADLINE_S = 200.0
HEAP = ("malloc", "free(", "corrupted", "tcache")  # what glibc says of a spoilt heap
TRIES = 3


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
    parser.add_argument("--cases", default="shipped", help="shipped, right, rate/4, floor*4 ...")
    parser.add_argument("--links", default=LOOPBACK)
    parser.add_argument("--programs", default="gathered", help=f"or all: {'; '.join(PROGRAMS)}")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--rounds", type=int, default=10, help="steps in each stretch")
    parser.add_argument("--turns", type=int, default=3, help="stretches untuned, and as many tuned")
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
        "jobs": {},
    }
    for job in jobs:
        known = results["jobs"].get(str(job))
        if known and not args.again and known.get("others", 9.0) <= args.spoilt:
            continue
        if time.monotonic() - start > args.seconds:
            print(f"left for the next call: {job}")
            continue
        found = run(job, args.rounds, args.turns)
        if not known or "others" not in known or found.get("others", 9.0) <= known["others"]:
            results["jobs"][str(job)] = found
        print(job, json.dumps(found), flush=True)
        if args.out:
            results["summary"] = summary(results["jobs"])
            Path(args.out).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(summary(results["jobs"]), indent=2))
    return 0


def summary(jobs: dict[str, Any]) -> dict[str, Any]:
    """Errors after tuning and ratios of what is kept, of the shipped topology by ranks, and of each wrong one."""
    found: dict[str, Any] = {}
    for name, job in jobs.items():
        if "ratio" in job:
            program, ranks, link, case = name.rsplit(", ", 3)
            group = f"shipped, {ranks}" if case == "shipped" else f"{program}, {link}, {case}"
            found.setdefault(group, []).append(job)
    return {
        group: {
            "jobs": len(of),
            "error_before_median": statistics.median(j["prediction_error_before"] for j in of),
            "error_after_median": statistics.median(j["prediction_error_after"] for j in of),
            "error_after_worst": max(j["prediction_error_after"] for j in of),
            "put_back": sum(j["decision"] == "put back" for j in of),
            "kept_ratios": sorted(j["ratio"] for j in of if j["decision"] != "put back"),
            "others_most": max(j["others"] for j in of),
        }
        for group, of in found.items()
    }


def read(path: str) -> dict[str, Any] | None:
    """What an earlier call wrote, of this form."""
    if not path or not Path(path).exists():
        return None
    found = json.loads(Path(path).read_text())
    return found if "jobs" in found else None


def run(job: Job, rounds: int, turns: int) -> dict[str, Any]:
    """One job, begun again where gloo spoilt its heap."""
    for crashes in range(TRIES):
        found = once(job, rounds, turns)
        if not any(word in said for said in found.get("failed", ()) for word in HEAP):
            return {**found, "crashes": crashes}
    return found


def once(job: Job, rounds: int, turns: int) -> dict[str, Any]:
    """One job on fresh ranks, with a cache of its own."""
    with tempfile.TemporaryDirectory() as work, hosts(job.link) as places:
        given = {
            **dataclasses.asdict(job),
            "rounds": rounds,
            "turns": turns,
            "topology": topology(Path(work), job),
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


def topology(work: Path, job: Job) -> str:
    """The shipped topology's name, or the path of one that is right but for what the case says."""
    from inductor_passes.machine.topology.rescale import write_rescaled

    if job.case == "shipped":
        return BASE
    path = work / "topology.json"
    what, sign, number = re.split(r"([*/])", f"{job.case}*1", maxsplit=2)[:3]
    factor = float(number) ** (-1 if sign == "/" else 1)
    write_rescaled(BASE, path, name="of this bench", compute=1 / factor if what == "compute" else 1)
    content = json.loads(path.read_text())
    links = content["links"]
    rate = "intra_node_gb_per_s"
    if job.link != LOOPBACK:
        rate = "inter_node_gb_per_s"
        content["ranks_per_node"]["value"] = job.ranks // 2
        links[rate]["value"] = gb_per_s(job.link)
    if what == "rate":
        links[rate]["value"] *= factor
    for protocol in links["protocols"] if what == "floor" else ():
        protocol["launch_us"]["value"] *= factor
        for where in ("intra_node", "inter_node"):
            protocol[where]["step_us"]["value"] *= factor
    path.write_text(json.dumps(content))
    return str(path)


def gb_per_s(link: str) -> float:
    """Of a rate as ``tc`` writes it, in bits."""
    number = link.removesuffix("bit")
    return float(number[:-1]) / 8 / {"g": 1, "m": 1000}[number[-1]]


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
        layers = 6 if program == "gathered" else 12
        width = NARROW if program == "narrow" else WIDTH
        x = torch.rand(ROWS, width)
        weights = [
            (torch.rand(width // ranks, width) / width).requires_grad_() for _ in range(layers)
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

    return train if program in ("gathered", "tensor parallel") else infer


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
    from inductor_passes.tuning.changes import is_changed

    torch.manual_seed(dist.get_rank())
    rounds, turns = job["rounds"], job["turns"]
    step = step_of(job["program"], job["ranks"], job["topology"])
    for _ in range(4):
        step()
    stretches: list[list[float]] = []
    launches: list[list[int]] = []
    records: list[list[GraphRecord]] = []
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
        records.append(clocks.records())
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
    report = dynamo_dist.tune(step, steps=max(4, 2 * rounds))
    tables = dict(measured.adopted())
    time_steps("tuned", tables)
    for turn in range(1, turns):
        time_steps(f"untuned {turn}", {})
        time_steps(f"tuned {turn}", tables)
    others = clock.others()
    if dist.get_rank() == 0:
        before, after = ([ms for each in stretches[i::2] for ms in each] for i in (0, 1))
        medians = [statistics.median(each) for each in stretches]
        changed, slower = is_changed(*records[:2]), report.after_us > noise * report.before_us
        spread = max(max(medians[i::2]) / min(medians[i::2]) - 1 for i in (0, 1))
        found = {
            "left": report.why,
            "changed": changed,
            **factors(tables.values()),
            "decision": "put back" if changed and slower else "tuned",
            "before_ms": quartiles(before),
            "after_ms": quartiles(after),
            "ratio": round(statistics.median(after) / statistics.median(before), 3),
            "spread": round(spread, 3),
            "medians_in_turn_ms": [round(median, 3) for median in medians],
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


def factors(tables: Iterable[Times]) -> dict[str, float]:
    """How many times as long compute and launches took as the topology says, as ``costs show`` prints it; all graphs together."""
    found: dict[str, list[NodeTime | LaunchTime]] = {"compute_factor": [], "launch_factor": []}
    for times in tables:
        found["compute_factor"] += times.computed()
        for graph in times.graphs.values():
            found["launch_factor"] += graph.launches.values()
    return {
        name: round(sum(e.us for e in of) / sum(e.predicted_us for e in of), 3)
        for name, of in found.items()
    }


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
