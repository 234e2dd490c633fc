import logging

import pytest

import inductor_passes as ip
from inductor_passes import _torch
from inductor_passes.owner import STOCK_SCHEDULERS, stock_schedulers_on

OPT_IN = "reorder_for_compute_comm_overlap"


def test_ours_on_means_stocks_off(caplog):
    patches = ip.options({OPT_IN: True})
    assert patches[OPT_IN] is False
    assert not stock_schedulers_on(patches)
    assert "two schedulers undo each other" in caplog.text


def test_ours_off_means_stocks_stay(caplog):
    assert ip.options({OPT_IN: True, "schedule": "off"})[OPT_IN] is True
    assert not caplog.text


def test_what_stock_runs_by_default_is_switched_off_in_silence(caplog):
    """From torch 2.14 one of stock's schedulers is on by default; before that there is none."""
    default_on = stock_schedulers_on({})
    patches = ip.options()
    assert all(patches[key] == STOCK_SCHEDULERS[key] for key in default_on)
    assert not stock_schedulers_on(patches)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_key_of_another_torch_is_patched():
    patches = ip.options({OPT_IN: True, "max_autotune": True})
    assert set(patches) <= _torch.config_keys()
    assert patches["max_autotune"] is True


@pytest.mark.parametrize("slot", ["post_grad_custom_pre_pass", "post_grad_custom_post_pass"])
def test_a_users_own_inductor_pass_is_kept_and_runs_first(slot):
    def mine(graph):
        return None

    ours = ip.options({slot: mine})[slot]
    kept = ours.attachment.chain_pre if "pre" in slot else ours.attachment.chain_post
    assert kept is mine
    again = ip.options({slot: ours})[slot]  # ours given back to us is not run twice
    kept = again.attachment.chain_pre if "pre" in slot else again.attachment.chain_post
    assert kept is None
