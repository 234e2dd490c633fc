"""Run a program of functional collectives as traced, and after the passes under each set of
options.
"""

from __future__ import annotations

import copy
import traceback

import torch
from fuzzing.execute import ROWS, Verdict, _brief, namespace
from fuzzing.program import Program
from fuzzing.spmd import Group, run
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_dist.numerics.differences import how_far
from inductor_passes.pass_options import split
from inductor_passes.pipeline import run_passes
from inductor_passes.testing import fake_group


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """The wait of a launch, as programs write it."""
    return torch.ops._c10d_functional.wait_tensor(tensor)


WORLD = "0"
NAMES = {"c10d": torch.ops._c10d_functional, "wait": wait}


def execute(program: Program) -> Verdict:
    """The verdict on the passes: each rank's outputs and inputs after, against the graph as
    traced.
    """
    with fake_group(program.ranks):
        try:
            graph, groups = traced(program)
            expected = values(program, graph, groups)
        except Exception as error:
            return Verdict("refused", _brief(error))
        for options in program.settings["options"]:
            changed = copy.deepcopy(graph)
            fx.GraphModule({}, changed)
            try:
                run_passes(changed, split(options)[0])
                changed.lint()
                found = values(program, changed, groups)
            except Exception as error:
                text = "".join(traceback.format_exception(error))[-6000:]
                return Verdict("crash", f"options {options}: {text}")
            for rank, (before, after) in enumerate(zip(expected, found, strict=True)):
                for at, (one, other) in enumerate(zip(before, after, strict=True)):
                    same = one.shape == other.shape and one.dtype == other.dtype
                    if problem := how_far(other, one) if same else "another shape or type":
                        return Verdict(
                            "mismatch", f"options {options}, rank {rank}, value {at}: {problem}"
                        )
    return Verdict("ok")


def traced(program: Program) -> tuple[fx.Graph, dict[str, Group]]:
    """The program's graph, with symbolic sizes if it is dynamic, and the ranks of its groups by
    name.
    """
    mesh = init_device_mesh("cpu", program.mesh)
    names = [group.group_name for group in mesh.get_all_groups()]
    step = namespace(program, "graph", more={**NAMES, "GROUPS": names})["step"]
    inputs = [given.draw(program.seed, 0, ROWS[0]) for given in program.inputs]
    mode = "symbolic" if program.dynamic else "fake"
    graph = make_fx(lambda *given: step(None, *given), tracing_mode=mode)(*inputs).graph
    ranks = torch.arange(program.ranks).view(program.mesh)
    groups: dict[str, Group] = {
        name: ranks.movedim(dim, -1).reshape(-1, program.mesh[dim]).tolist()
        for dim, name in enumerate(names)
    }
    return graph, {WORLD: [list(range(program.ranks))], **groups}


def values(program: Program, graph: fx.Graph, groups: dict[str, Group]) -> list[list[torch.Tensor]]:
    """What every rank returns, and then its inputs."""
    inputs = [
        [given.draw(program.seed, rank, ROWS[0]) for rank in range(program.ranks)]
        for given in program.inputs
    ]
    outputs = run(graph, inputs, groups)
    return [[*outs, *(of_ranks[rank] for of_ranks in inputs)] for rank, outs in enumerate(outputs)]
