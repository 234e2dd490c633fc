#!/usr/bin/env python
"""The programs on real ranks: on each of 8 gloo processes a compiled program gives what eager gives there.

    python ranks.py [--backend aot_eager] [--plugin dynamo_dist] [--names FILE] [--ranks 8] [--deadline 60] [--out FILE]

One team of processes runs program after program. Each rank's plain tensors differ, so that a collective that is lost or has other members
changes values. Verdicts are merged over ranks:

    same         on every rank
    differ       some rank's values, types or placements are not eager's
    error        the compiled program fails on some rank
    hang         no end within the deadline; the team is killed, and a new one goes on with the next program
    meaningless  eager fails on some rank: the program is written for one rank, or gloo lacks what it needs

One JSON line per program, and with it what each rank that is not "same" said."""
import argparse, collections, contextlib, io, json, logging, os, re, signal, sys, tempfile, time, warnings
from datetime import timedelta

HERE = os.path.dirname(os.path.abspath(__file__))
# Families whose plain tensors may differ from rank to rank; elsewhere they stand for replicated values.
SPREAD = {"c10d_sync", "async", "act", "funcol", "dist_nn", "pg", "exp", "issues"}

# What gloo leaves in the buffers of other ranks than the destination is undefined; here they stay as they were.
DESTINATION_ONLY = {"reduce", "dnf_reduce"}
# Words of gloo after which its connections are of no more use.
BROKEN = r"gloo|imed out|closed|timeout|Socket"


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="aot_eager")
    parser.add_argument("--plugin", default="dynamo_dist")
    parser.add_argument("--names", help="a file with names of programs; all by default")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--deadline", type=float, default=60)
    parser.add_argument("--out")
    return parser.parse_args()


class Rank:
    """One process of a team. It reads names from standard input and answers each with a JSON line."""

    def __init__(self, given):
        import torch.distributed as dist

        self.rank, self.ranks, self.deadline = given.rank, given.ranks, given.deadline
        self.store = dist.FileStore(given.store, self.ranks)
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.ranks, timeout=timedelta(seconds=self.deadline))
        import common

        plain, self.family = common.T, None

        def spread(*shape, **kwargs):
            tensor = plain(*shape, **kwargs)
            if self.family in SPREAD:
                tensor.data.add_(self.rank)
            return tensor
        common.T = spread
        sys.argv = ["run.py", "--backend", given.backend, "--plugin", given.plugin]
        import run

        self.run = run
        self.cases = {case["name"]: case for case in run.C.CASES}

    def agree(self, stage, status):
        """Every rank's word on a stage, once all have one: the first that is not "same"."""
        self.store.set(f"{stage}/{self.rank}", status)
        keys = [f"{stage}/{rank}" for rank in range(self.ranks)]
        try:
            self.store.wait(keys, timedelta(seconds=self.deadline))
        except Exception:
            return f"timeout: not every rank ends {stage}"
        words = [self.store.get(key).decode() for key in keys]
        return next((word for word in words if word != "same"), "same")

    def stage(self, function):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return function(), "same"
        except Exception as error:
            return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def all_calls(self, case, setup, function):
        def waited(*args):
            out = function(*args)
            for work in self.run.pytree.tree_leaves(out):
                if isinstance(work, self.run.dist.Work):
                    work.wait()
            return out
        return [self.run.go(case, setup, waited, args) for args in setup["args_list"]]

    def verdict(self, number, case):
        run, dynamo = self.run, self.run.dynamo
        self.family = case["family"]
        dynamo.reset(); run.clear_dtensor()
        expected = []
        for attempt in range(2 if case["opts"].get("compare") is False else 1):
            setup = run.build(case)
            values, word = self.stage(lambda: self.all_calls(case, setup, setup["fn"]))
            if self.agree(f"{number}/eager{attempt}", word) != "same":
                return dict(status="meaningless", why=word)
            expected.append(values)
        if len(expected) == 2 and any(map(run.cmp, *expected)):
            return dict(status="meaningless", why="eager gives other values each time")
        patch = dynamo.config.patch(**case["opts"]["config"]) if case["opts"].get("config") else contextlib.nullcontext()
        with patch:
            setup = run.build(case)
            function = run.compiled(case, setup, not case["opts"].get("nofg"))
            values, word = self.stage(lambda: self.all_calls(case, setup, function))
        end = self.agree(f"{number}/compiled", "same")
        if word != "same":
            return dict(status="error", why=word)
        if end != "same":
            return dict(status="hang", why=end)
        if case["name"] in DESTINATION_ONLY and self.rank != 0:
            return dict(status="same")
        wrong = next(filter(None, map(run.cmp, expected[0], values)), None)
        return dict(status="differ", why=wrong) if wrong else dict(status="same")

    def serve(self):
        print("ready", flush=True)
        for line in sys.stdin:
            number, name = line.split()
            print(json.dumps(self.verdict(number, self.cases[name])), flush=True)


class Fork:
    """A rank as a fork of this process, which has torch imported and has done nothing with it."""

    def __init__(self, given):
        (its_in, put), (get, its_out) = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                for file, stream in ((its_in, 0), (its_out, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
                    os.dup2(file, stream)
                sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
                os.close(put); os.close(get); os.chdir(HERE)
                logging.disable(logging.CRITICAL); warnings.simplefilter("ignore")
                Rank(given).serve()
            finally:
                os._exit(1)
        os.close(its_in); os.close(its_out)
        self.stdin, self.stdout = os.fdopen(put, "wb", 0), os.fdopen(get, "rb", 0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        os.waitpid(self.pid, 0)
        self.stdin.close(); self.stdout.close()


class Team:
    """Processes that run programs together until one of them fails to answer."""

    def __init__(self, given):
        self.given, self.folder = given, tempfile.TemporaryDirectory()
        given.store = os.path.join(self.folder.name, "store")
        self.processes = [Fork(argparse.Namespace(**vars(given) | {"rank": rank})) for rank in range(given.ranks)]
        for process in self.processes:
            os.set_blocking(process.stdout.fileno(), False)
        self.answers("start", 10 * given.deadline)

    def answers(self, what, seconds):
        """One line of each rank; None from those that are silent at the deadline."""
        end, found = time.monotonic() + seconds, [b""] * len(self.processes)
        while time.monotonic() < end and not all(text.endswith(b"\n") for text in found):
            for rank, process in enumerate(self.processes):
                if not found[rank].endswith(b"\n"):
                    found[rank] += process.stdout.read() or b""
            time.sleep(0.02)
        return [text.decode() if text.endswith(b"\n") else None for text in found]

    def run(self, number, name):
        for process in self.processes:
            process.stdin.write(f"{number} {name}\n".encode())
            process.stdin.flush()
        return [json.loads(text) if text else None for text in self.answers(name, 3 * self.given.deadline + 10)]

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.folder.cleanup()


ORDER = ("hang", "meaningless", "differ", "error", "same")


def merged(name, words):
    """One record of what all ranks said."""
    words = [word or dict(status="hang") for word in words]
    status = next(status for status in ORDER if any(word["status"] == status for word in words))
    record = dict(name=name, status=status)
    said = {str(rank): word.get("why", "no answer") for rank, word in enumerate(words) if word["status"] == status != "same"}
    return record | ({"ranks": said} if said else {})


def names_of(given):
    if given.names:
        return open(given.names).read().split()
    return [json.loads(line)["name"] for line in open(os.path.join(HERE, "stock_2.13.0.jsonl"))]


def main(given):
    team, total, out = None, collections.Counter(), open(given.out, "w") if given.out else None
    try:
        for number, name in enumerate(names_of(given)):
            team = team or Team(given)
            record = merged(name, team.run(number, name))
            line = json.dumps(record)
            print(line, flush=True)
            if out:
                out.write(line + "\n"); out.flush()
            total[record["status"]] += 1
            if record["status"] == "hang" or any(re.search(BROKEN, why) for why in record.get("ranks", {}).values()):
                team.end(); team = None
    finally:
        if team:
            team.end()
    print("SUMMARY", dict(total))


if __name__ == "__main__":
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    import torch._dynamo.backends.common, torch._inductor.compile_fx, torch.distributed.tensor.parallel

    main(options())
