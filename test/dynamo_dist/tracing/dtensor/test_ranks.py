"""The programs of ``ranks_worker.py`` on four real ranks, where a collective that is lost
changes values.
"""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.main
@pytest.mark.slow
def test_compiled_is_eager_on_every_rank(on_ranks):
    on_ranks(WORKER, ranks=4)
