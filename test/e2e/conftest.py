"""What these tests share: workers that run many cases one behind the other."""

import collections
import functools
import json

import preloaded
import pytest


@pytest.fixture(scope="module")
def asked(request):
    """What the tests of a file that are to run have for parameters, in order: one run of ranks
    serves them all.
    """
    here = [each for each in request.session.items if each.path == request.path]
    return [each.callspec.params for each in here if hasattr(each, "callspec")]


@pytest.fixture(scope="session")
def cases_on_ranks():
    """``cases_on_ranks(worker, ranks, cases, folder)``: what each rank says of each case.

    The worker gets a folder and the cases, and keeps what it says in ``<rank>.json`` there. Of a
    case without a result the end of the rank's log is said. Compiled code goes to the folder, and
    nothing is downloaded.
    """

    def run(worker, ranks, cases, folder, *, timeout):
        variables = {
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled"),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        arguments = [str(folder), *cases]
        preloaded.run_ranks(worker, ranks, arguments, variables, folder=folder, timeout_s=timeout)
        found = []
        for rank in range(ranks):
            file, log = folder / f"{rank}.json", folder / f"rank{rank}.log"
            lost = functools.partial(str, f"rank {rank} has no result: {log.read_text()[-3000:]}")
            results = json.loads(file.read_text()) if file.exists() else {}
            found.append(collections.defaultdict(lost, results))
        return found

    return run
