"""One rank of ``test_conformance.py``: programs as ``name-optimizer-ranks``; what each said goes
to ``<rank>.json``.
"""

import datetime
import gc
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import dynamo_dist
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.testing import leave_process

sys.path.insert(0, str(Path(__file__).parents[1] / "wrapped"))
import ddp  # noqa: F401 - registers programs, as that below does
import fsdp2  # noqa: F401
import harness  # counts launches as the wrapped programs do


def main():
    out, *cases = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    dynamo_dist.enable()
    results = {}
    gc.disable()
    for case in cases:
        gc.freeze()
        start = time.perf_counter()
        try:
            with (
                graph_passes_only(),
                torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64),
                mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0),
            ):
                harness.compare(*case.split("-"))
            results[case] = "ok"
        except BaseException:  # pytest's own too
            results[case] = traceback.format_exc()
        print(
            f"{time.perf_counter() - start:.1f} s {case} {results[case][-1500:]}",
            file=sys.stderr,
            flush=True,
        )
        Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(results))
        dist.barrier()


main()
leave_process()
