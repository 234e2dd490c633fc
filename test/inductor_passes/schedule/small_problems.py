"""Schedule problems small enough to solve by trying everything, and the trying."""

import gzip
import itertools
import json
from pathlib import Path

from hypothesis import strategies as st

from inductor_passes.errors import ProblemError
from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.problem import Node, Problem, Schedule
from inductor_passes.simulate.execution import live_bytes

MIB = 2**20
# Floor 10 us up to 1 MiB, then 5 us a MiB: two launches of 1 MiB take 20 us apart and 15 merged.
LINK = ((1.0, 10.0), (2.0, 15.0), (4.0, 25.0))


def problem(*nodes, groups=("a", "b"), copy_bytes_per_us=1e12, stretch=1.0):
    """Nodes in program order; copying is free unless said."""
    links = {group: {"all_gather": LINK, "reduce_scatter": LINK} for group in groups}
    return Problem("small", nodes, links, copy_bytes_per_us, dict.fromkeys(groups, 4), stretch)


def node_input():
    return Node("input", "input")


def compute(us, *deps, size=0):
    return Node("compute", "compute", deps, us, size)


def launch(*deps, op="all_gather", group="a", payload=MIB, size=0):
    reduce = "sum" if op == "reduce_scatter" else None
    return Node(
        "launch", "launch", deps, bytes=size, group=group, op=op, dtype="bf16", reduce=reduce,
        payload=payload,
    )  # fmt: skip


def wait(of, *kept):
    """``kept``: what the launch reads, if that is to be held until it is done."""
    return Node("wait", "wait", (*kept, of), alias=of, launch=of)


def blocking(us, *deps, group="a", size=0):
    """A collective that holds the compute stream."""
    return Node("blocking", "compute", deps, us, size, group=group)


def output(*deps):
    return Node("output", "output", deps)


def layers(count, us=10.0, size=0):
    """A gathered weight per layer; program order waits for each gather right after its launch."""
    nodes = [node_input() for _ in range(count)]
    last = None
    for i in range(count):
        at = len(nodes)
        nodes += [launch(i, size=size), wait(at)]
        nodes.append(compute(us, at + 1, *(() if last is None else (last,)), size=MIB))
        last = len(nodes) - 1
    return problem(*nodes, output(last))


@st.composite
def problems(draw, most=6):
    """Up to ``most`` tasks on two groups, every launch with a wait, an output that reads all."""
    nodes = [node_input()]
    values = [0]
    for _ in range(draw(st.integers(1, most))):
        deps = tuple(sorted(draw(st.sets(st.sampled_from(values), min_size=1, max_size=2))))
        size = draw(st.integers(0, 3)) * MIB
        kind = draw(st.sampled_from(["launch", "launch", "compute", "compute", "blocking"]))
        if kind == "launch":
            op = draw(st.sampled_from(["all_gather", "reduce_scatter"]))
            group = draw(st.sampled_from(["a", "b"]))
            payload = draw(st.integers(1, 3)) * MIB
            nodes.append(launch(*deps, op=op, group=group, payload=payload, size=size))
            nodes.append(wait(len(nodes) - 1, *(deps if draw(st.booleans()) else ())))
        elif kind == "compute":
            nodes.append(compute(float(draw(st.integers(0, 20))), *deps, size=size))
        else:
            group = draw(st.sampled_from(["a", "b"]))
            us = float(draw(st.integers(1, 20)))
            nodes.append(blocking(us, *deps, group=group, size=size))
        values.append(len(nodes) - 1)
    return problem(
        *nodes,
        output(*values[1:]),
        copy_bytes_per_us=draw(st.sampled_from([1e6, 1e12])),
        stretch=draw(st.sampled_from([1.0, 1.5])),
    )


def optimum(of, cap_bytes):
    """The least makespan of any order and buckets within the cap."""
    best = float("inf")
    for buckets in _bucketings(of):
        for order in _orders(of):
            try:
                evaluated = evaluate(of, Schedule(order, buckets))
            except ProblemError:
                continue
            if evaluated.peak_bytes <= cap_bytes:
                best = min(best, evaluated.makespan_us)
    return best


def _orders(of, done=()):
    if len(done) == len(of.nodes):
        yield done
    for i, node in enumerate(of.nodes):
        if i not in done and all(d in done for d in node.deps):
            yield from _orders(of, (*done, i))


def _bucketings(of):
    keys = {}
    for i, node in enumerate(of.nodes):
        if node.kind == "launch":
            keys.setdefault(node.merge_key, []).append(i)
    choices = []
    for members in keys.values():
        subsets = [
            c for n in range(2, len(members) + 1) for c in itertools.combinations(members, n)
        ]
        choices.append([None, *subsets])
    for chosen in itertools.product(*choices):
        yield tuple(bucket for bucket in chosen if bucket)


def peak_of_values(fresh_bytes, uses):
    """Most bytes alive at once; ``uses[i]``: entries whose bytes must still be there while i
    runs.
    """
    last = list(range(len(fresh_bytes)))
    for i, used in enumerate(uses):
        for owner in used:
            last[owner] = i
    return max(live_bytes(fresh_bytes, last), default=0)


def as_json(problem):
    """The problem as JSON values."""
    return {
        "name": problem.name,
        "nodes": [_node_as_json(node) for node in problem.nodes],
        "links": {group: dict(tables) for group, tables in problem.links.items()},
        "copy_bytes_per_us": problem.copy_bytes_per_us,
        "group_size": dict(problem.group_size),
        **({"compute_stretch": problem.compute_stretch} if problem.compute_stretch != 1.0 else {}),
    }


def _node_as_json(node):
    data = {key: getattr(node, key) for key in ("name", "kind", "deps", "us", "bytes", "alias")}
    if node.blocks:
        data["group"] = node.group
    if node.kind == "launch":
        of_launch = ("group", "op", "dtype", "payload", "reduce")
        data.update({key: getattr(node, key) for key in of_launch})
    if node.kind == "wait":
        data["launch"] = node.launch
    return data


def save(problem, path):
    """Write a problem; gzipped if the name ends in ``.gz``."""
    text = json.dumps(as_json(problem)).encode()
    Path(path).write_bytes(gzip.compress(text) if Path(path).suffix == ".gz" else text)
