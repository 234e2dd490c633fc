import logging

import pytest

import inductor_passes as ip
from inductor_passes.inductor import options
from inductor_passes.inductor.options import UPSTREAM_SCHEDULERS, upstream_schedulers_on
from inductor_passes.torch_compat import inductor

OPT_IN = "reorder_for_compute_comm_overlap"


@pytest.fixture(autouse=True)
def nothing_said():
    options._said.clear()


def test_ours_on_means_upstreams_off(caplog):
    patches = ip.options({OPT_IN: True})
    assert patches[OPT_IN] is False
    assert not upstream_schedulers_on(patches)
    assert "two schedulers undo each other" in caplog.text


def switched_on(key):
    """A value of the key other than what ours sets."""
    return "all" if UPSTREAM_SCHEDULERS.get(key) == "none" else True


SET_BY_USERS = [
    *(key for key in UPSTREAM_SCHEDULERS if key in inductor.config_keys()),
    "reorder_for_locality",
]


@pytest.mark.parametrize("key", SET_BY_USERS[:-1])
def test_what_was_set_for_the_process_is_said_once(key, caplog):
    if inductor.get_config(key) == switched_on(key):
        pytest.skip("this torch has it on by itself: to set it so is to leave it")
    with inductor.inductor_config().patch({key: switched_on(key)}):
        for _ in range(2):
            ip.options()
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"({key}, set in torch._inductor.config)" in said.getMessage()


@pytest.mark.parametrize("key", SET_BY_USERS)
def test_what_was_set_in_options_is_said_once(key, caplog):
    for _ in range(2):
        ip.options({key: switched_on(key)})
    (said,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"({key}, set in options)" in said.getMessage()


def test_what_was_switched_off_for_the_process_is_not_said(caplog):
    off = {key: UPSTREAM_SCHEDULERS.get(key, False) for key in SET_BY_USERS}
    with inductor.inductor_config().patch(off):
        ip.options()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_ours_off_means_upstreams_stay(caplog):
    assert ip.options({OPT_IN: True, "schedule": "off"})[OPT_IN] is True
    assert not caplog.text


def test_upstreams_default_reordering_is_off_silently(caplog):
    """From torch 2.14 one of upstream's schedulers is on by default; before that there is none."""
    default_on = upstream_schedulers_on({})
    patches = ip.options()
    assert all(patches[key] == UPSTREAM_SCHEDULERS[key] for key in default_on)
    assert not upstream_schedulers_on(patches)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_key_of_another_torch_is_patched():
    patches = ip.options({OPT_IN: True, "max_autotune": True})
    assert set(patches) <= inductor.config_keys()
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
