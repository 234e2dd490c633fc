"""``gloo_worker.py FOLDER [BACKEND]``: one of four gloo ranks, which run every program, eager and
compiled.

Each writes ``rank<r>.json``: program -> "" or what differs from eager.
"""

import copy
import json
import logging
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from inductor_passes.testing import leave_process

sys.path.insert(0, str(Path(__file__).parent))
from gloo_programs import PROGRAMS


def run(function, rank, groups):
    torch.manual_seed(rank)
    x = torch.randn(8, 8)
    leaf = x.clone().requires_grad_() if function.__name__.startswith("nn_") else None
    if leaf is not None:
        x = leaf * 1.0
    out = function(x, rank, groups)
    for work in tree_leaves(out):
        if isinstance(work, dist.Work):
            work.wait()
    values = [value for value in tree_leaves(out) if not isinstance(value, dist.Work)] + [x]
    values = [copy.deepcopy(v.detach()) if isinstance(v, torch.Tensor) else v for v in values]
    if leaf is not None:
        sum(value.sum() for value in tree_leaves(out)).backward()
        values.append(leaf.grad)
    return values


def difference(eager, compiled):
    if len(eager) != len(compiled):
        return f"{len(eager)} values eager, {len(compiled)} compiled"
    for i, (a, b) in enumerate(zip(eager, compiled, strict=True)):
        same = torch.allclose(a, b, rtol=1e-5) if isinstance(a, torch.Tensor) else a == b
        if not same:
            return f"value {i}: {a} eager, {b} compiled"
    return ""


def main(folder, backend):
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    rank = dist.get_rank()
    logging.disable(logging.WARNING)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {"half": halves[rank // 2], "first": halves[0], "second": halves[1]}
    import dynamo_dist

    dynamo_dist.enable()
    result = {}
    for name, function in PROGRAMS.items():
        torch._dynamo.reset()
        eager = run(function, rank, groups)
        try:
            compiled = run(torch.compile(function, backend=backend, fullgraph=True), rank, groups)
            result[name] = difference(eager, compiled)
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"[:600]
        Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    leave_process()


if __name__ == "__main__":
    main(sys.argv[1], (sys.argv[2:] or ["aot_eager"])[0])
