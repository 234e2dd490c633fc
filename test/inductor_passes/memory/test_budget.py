"""What a memory budget may be, and how ranks agree on the least."""

import random

import pytest
import torch
from job_model import interleaved

from inductor_passes.errors import OptionError
from inductor_passes.memory.budget import agree_on_least, budget_bytes
from inductor_passes.pass_options import PassOptions


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("60GiB", 60 * 2**30),
        (" 1.5 gb ", 1_500_000_000),
        ("800 MiB", 800 * 2**20),
        (12345, 12345),
        (0.9, 0.9),
        (1.0, 1.0),
    ],
)
def test_sizes_are_read(given, kept):
    assert PassOptions(extra={"memory": given}).extra == {"memory": kept}


def test_none_is_no_option():
    assert PassOptions(extra={"memory": None}) == PassOptions()


@pytest.mark.parametrize("given", ["60 GiB of", "", "GiB", "-3GiB", -1, 0, True, 1.5, float("nan")])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(OptionError, match="Give bytes as '60GiB'"):
        PassOptions(extra={"memory": given})


def test_share_of_memory_without_limit_is_refused():
    with pytest.raises(OptionError, match="Tensors are on cpu, whose memory has no limit"):
        budget_bytes(0.9, torch.device("cpu"))


def test_share_and_too_much_of_a_device(monkeypatch):
    class Properties:
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())
    device = torch.device("cuda")
    assert budget_bytes(0.5, device) == 40 * 2**30
    assert budget_bytes(2**30, device) == 2**30
    with pytest.raises(OptionError, match=r"cuda has 80\.0 GiB"):
        budget_bytes(81 * 2**30, device)


def agreed(seed):
    """What ranks agree on in a drawn interleaving, None for one that never comes, and what each
    of them has.
    """
    rng = random.Random(seed)
    budgets = [rng.choice((3, 5, 10)) for _ in range(rng.choice((2, 3, 4)))]
    absent = {rank for rank in range(len(budgets)) if rng.random() < 0.15}
    found = dict.fromkeys(range(len(budgets)))
    steps = {
        rank: agree_on_least("k", rank, range(len(budgets)), budget)
        for rank, budget in enumerate(budgets)
        if rank not in absent
    }
    found |= interleaved(steps, rng)
    return found, budgets


def test_ranks_agree_on_one_budget_that_one_of_them_has():
    least = 0
    for seed in range(300):
        found, budgets = agreed(seed)
        values = {each for each in found.values() if each is not None}
        assert len(values) <= 1 and values <= set(budgets), seed
        least += values == {min(budgets)}
    assert least > 200  # all came in time
