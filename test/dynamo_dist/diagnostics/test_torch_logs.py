"""``TORCH_LOGS=graph_breaks`` shows breaks of this package as it shows torch's own."""

import logging

import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist.testing import fake_mesh


def test_torch_logs_show_kind_line_reason_and_fix():
    def acts(x, group):
        group.allreduce([x]).wait()
        return x + 1

    records = []
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    handler = logging.Handler()
    handler.emit = records.append
    torch._logging.set_logs(graph_breaks=True)
    logger.addHandler(handler)
    try:
        with fake_mesh(), dynamo_dist.enabled():
            torch.compile(acts, backend="aot_eager")(torch.ones(2), dist.group.WORLD)
    finally:
        logger.removeHandler(handler)
        torch._logging.set_logs()
        torch.compiler.reset()
    text = "\n".join(record.getMessage() for record in records)
    assert "Method of a distributed object that is written in C++" in text
    assert "group.allreduce([x])" in text
    assert __file__ in text
    assert "Explanation: allreduce of ProcessGroup is no constant of the object" in text
    assert "Hint: Call it outside the compiled function." in text
