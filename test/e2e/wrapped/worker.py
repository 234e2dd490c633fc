"""One rank of ``test_wrapped.py``: programs by name; what each said goes to ``<rank>.json`` in
the first argument.
"""

import datetime
import gc
import json
import sys
import time
import traceback
import warnings
from unittest import mock

import torch
import torch.distributed as dist

import dynamo_dist
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.testing import leave_process

# In this order they run: programs that share a model one behind the other.
# isort: off
import accumulation_programs  # noqa: F401 - registers programs, as those below do
import between_programs  # noqa: F401
import ddp_programs  # noqa: F401
import fsdp2_programs  # noqa: F401
import uses_programs  # noqa: F401
import refused_programs  # noqa: F401
import unlike_programs  # noqa: F401
import beside_eager
# isort: on


def main():
    out, *cases = sys.argv[1:]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    dynamo_dist.enable()
    rank, found = dist.get_rank(), beside_eager.PROGRAMS[dist.get_world_size()]
    results = {}
    gc.disable()  # a third of the time otherwise
    for name in [each for each in found if not cases or each in cases]:  # in the order of above
        gc.freeze()  # what is older than the program is not looked through for its optimizers
        start, busy = time.perf_counter(), time.process_time()
        beside_eager.LAUNCHED.clear()
        torch._dynamo.utils.counters.clear()
        try:
            with (
                graph_passes_only(),
                torch._dynamo.config.patch(automatic_dynamic_shapes=False, recompile_limit=64),
                mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0),
            ):
                found[name]()
            results[name] = "ok"
        except BaseException:  # pytest's own too
            results[name] = traceback.format_exc()
        seconds = time.perf_counter() - start
        print(
            f"{seconds:.1f} s {time.process_time() - busy:.1f} s {name} {results[name][-1500:]} "
            f"{beside_eager.LAUNCHED}",
            file=sys.stderr,
            flush=True,
        )
        with open(f"{out}/{rank}.json", "w") as file:
            json.dump(results, file)
        dist.barrier()


main()
leave_process()
