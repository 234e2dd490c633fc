"""Programs that train for twenty steps under each wrapper, one graph a step, beside eager mode."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("programs_worker.py")


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("wrapper", ["tp", "sp", "fsdp2", "ddp", "ep", "dropless ep"])
def test_programs_of_two_ranks(on_ranks, wrapper):
    on_ranks(WORKER, 2, wrapper)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("wrapper", ["hsdp", "fsdp2 x tp"])
def test_programs_of_four_ranks(on_ranks, wrapper):
    on_ranks(WORKER, 4, wrapper)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("memory", ["24KiB", "1KiB"])  # the second is less than any step takes
@pytest.mark.parametrize("wrapper", ["tp", "sp", "fsdp2", "ddp", "ep"])
def test_programs_within_memory_budgets(on_ranks, wrapper, memory):
    on_ranks(WORKER, 2, wrapper, f"--memory={memory}")
