"""The collector of cycles is slowed or paused for a block, and then as it was, in whatever order
threads leave.
"""

import gc
import threading

import pytest

from inductor_passes.garbage_collector import rare_cycle_collection, without_cycle_collection


@pytest.fixture(autouse=True)
def restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.enable()


def test_it_looks_rarely_in_a_block():
    gc.set_threshold(700, 11, 12)
    with rare_cycle_collection(), rare_cycle_collection():
        assert gc.get_threshold() == (10_000, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("given", [(0, 10, 10), (50_000, 10, 10)])
def test_what_is_off_or_rarer_stays(given):
    gc.set_threshold(*given)
    with rare_cycle_collection():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given


def test_block_that_ends_before_its_inner_one_restores_nothing():
    gc.set_threshold(700, 10, 10)
    entered, leave = threading.Event(), threading.Event()

    def longer():
        with rare_cycle_collection():
            entered.set()
            leave.wait(10)

    other = threading.Thread(target=longer)
    with rare_cycle_collection():
        other.start()
        entered.wait(10)
    assert gc.get_threshold()[0] == 10_000
    leave.set()
    other.join()
    assert gc.get_threshold()[0] == 700


def test_it_is_back_after_an_error():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), rare_cycle_collection(), without_cycle_collection():
        assert not gc.isenabled()
        _ = 1 / 0
    assert gc.isenabled() and gc.get_threshold() == before
