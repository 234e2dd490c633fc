"""The rank in the keys of torch's caches."""

import contextlib
import threading

import pytest
import torch

from inductor_passes.testing import fake_group
from inductor_passes.torch_compat.caches import keyed_by_rank


def tag(group=None):
    with group or contextlib.nullcontext(), keyed_by_rank():
        return torch.compiler.config.cache_key_tag


def test_each_rank_of_each_number_of_ranks_has_keys_of_its_own():
    tags = [tag(), tag(fake_group(4, 0)), tag(fake_group(4, 1)), tag(fake_group(8, 1))]
    assert len(set(tags)) == len(tags)
    assert tag(fake_group(4, 1)) == tags[2]


@pytest.mark.parametrize("failing", [False, True])
def test_the_tag_is_the_programs_own_again_afterwards(failing):
    before = torch.compiler.config.cache_key_tag
    with contextlib.suppress(ZeroDivisionError), fake_group(4), keyed_by_rank():
        assert torch.compiler.config.cache_key_tag == f"{before} rank 0 of 4"
        1 / (not failing)
    assert torch.compiler.config.cache_key_tag == before


def test_what_the_user_has_not_set_stays_unset(monkeypatch):
    # dynamo_dist.disable() puts the default back, which a value that is set would hide.
    seen = []

    def compile_and_look():
        tag(fake_group(4))
        default = torch.compiler.config._config["cache_key_tag"]
        monkeypatch.setattr(default, "default", "another")
        seen.append(torch.compiler.config.cache_key_tag)

    thread = threading.Thread(target=compile_and_look)  # where nothing has been set yet
    thread.start()
    thread.join()
    assert seen == ["another"]
