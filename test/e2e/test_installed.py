"""``torch.compile(model)`` with the passes installed, on two real ranks beside upstream: the
scenarios of the worker.
"""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("installed_worker.py")


@pytest.mark.slow
def test_programs_that_name_no_backend(on_ranks):
    on_ranks(WORKER, ranks=2, timeout=300)
