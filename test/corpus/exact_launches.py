#!/usr/bin/env python
"""Does a compiled program launch exactly what eager launches, and wait for all of it?

    python exact_launches.py [--plugin dynamo_dist] [--case SUBSTR] [--family F,G] [--names FILE] [--out FILE]

``launches.py`` compares kind and number. Here eager runs first, by upstream torch, then the compiled program, and each launch is compared by
kind, members of the group, bytes, dtype, reduce op, peer and place in the order. One JSON line per program. Statuses:

    same       all of that
    order      the same launches in another order
    pieces     the same bytes to the same members, cut otherwise (FSDP2 packs the parameters of a module; here the scheduler does, later)
    differ     other launches; "missing" and "added" name them
    hidden     a graph launched something that it does not show as a node
    unwaited   a launch in a graph is neither waited for nor handed out, or a Work was left over at the end
    no-graph   the program does not compile in one graph, or fails
    none       not compared: eager fails, or several calls of one function
"""
import argparse, collections, contextlib, importlib, io, json, os, signal, sys

parser = argparse.ArgumentParser()
for option in ("plugin", "case", "family", "names", "out"):
    parser.add_argument(f"--{option}")
OPTIONS = parser.parse_args()
sys.argv = ["run.py"]
import run as R
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from recording import Recorder
from showing import Graphs, verdict

RECORDER = Recorder()


def launched(case, setup, function):
    """What one run launches: the function and its backward, not what the harness does between them."""
    seen, backward = [], torch.Tensor.backward

    def forward(*args):
        with RECORDER.on(seen):
            out = function(*args)
            for work in pytree.tree_leaves(out):
                if isinstance(work, dist.Work):
                    work.wait()
        return out

    def recorded(self, *args, **kwargs):
        with RECORDER.on(seen):
            return backward(self, *args, **kwargs)
    torch.Tensor.backward = recorded
    try:
        R.go(case, setup, forward, setup["args_list"][0])
    finally:
        torch.Tensor.backward = backward
    return seen


def eager(case):
    """The launches of upstream eager; None for a program that is not compared."""
    torch._dynamo.reset(); R.clear_dtensor()
    setup = R.build(case)
    if len(setup["args_list"]) != 1 or case["opts"].get("nofg"):
        return None
    return launched(case, setup, setup["fn"])


def compiled(case):
    """The launches of the compiled program, and what its graphs hide or leave unwaited."""
    eager(case)  # groups that the program makes are there, as when it runs for a second time
    torch._dynamo.reset(); R.clear_dtensor()
    options, setup, graphs = case["opts"], R.build(case), Graphs(RECORDER)
    before = torch._C._distributed_c10d._get_work_registry_size()
    patch = torch._dynamo.config.patch(**options["config"]) if options.get("config") else contextlib.nullcontext()
    with patch:
        seen = launched(case, setup, torch.compile(setup["fn"], backend=graphs.backend(), fullgraph=True, dynamic=options.get("dynamic")))
    left = torch._C._distributed_c10d._get_work_registry_size() - before
    if left > 0:
        graphs.unwaited.append(f"{left} Works at the end")
    return seen, graphs


class Deadline(BaseException):
    pass


def within(seconds, function, *args):
    """Call with a deadline, output swallowed; the result, or the exception."""
    def stop(*_):
        raise Deadline(f"no end after {seconds} s")
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return function(*args)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    finally:
        signal.alarm(0)


def check(case, before, seconds=300):
    """One program's record; ``before`` is what ``eager`` gave."""
    record = dict(name=case["name"], family=case["family"])
    if not isinstance(before, list):
        return record | dict(status="none", why="eager fails" if before is not None else "several calls")
    found = within(seconds, compiled, case)
    if isinstance(found, BaseException):
        return record | dict(status="no-graph", eager=len(before), why=f"{type(found).__name__}: {found}".splitlines()[0][:120])
    return record | verdict(before, *found)


def chosen():
    names = set(open(OPTIONS.names).read().split()) if OPTIONS.names else None
    for case in R.C.CASES:
        if OPTIONS.case and OPTIONS.case not in case["name"]: continue
        if OPTIONS.family and case["family"] not in OPTIONS.family.split(","): continue
        if names is None or case["name"] in names:
            yield case


def main():
    cases = list(chosen())
    before = [within(90, eager, case) for case in cases]
    if OPTIONS.plugin:
        importlib.import_module(OPTIONS.plugin).enable()
    total, out = collections.Counter(), open(OPTIONS.out, "w") if OPTIONS.out else None
    for case, launches in zip(cases, before):
        line = json.dumps(check(case, launches))
        print(line, flush=True)
        if out:
            out.write(line + "\n")
        total[json.loads(line)["status"]] += 1
    print("SUMMARY", dict(total))


if __name__ == "__main__":
    main()
