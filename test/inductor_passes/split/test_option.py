"""The option ``split``: what it takes, and what caches see of it."""

import pytest

from inductor_passes import PassOptions
from inductor_passes.errors import OptionError
from inductor_passes.pass_options import split


@pytest.mark.parametrize("bad", [0, 1, -2, True, False, 2.0, "two", None, [2]])
def test_a_bad_number_of_chunks_is_refused(bad):
    with pytest.raises(OptionError) as caught:
        split({"split": bad})
    words = [f"'split' is {bad!r}", "2 parts or more", "'off', 'auto' or a whole"]
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("parts", [2, "auto"])
def test_chunks_without_the_scheduler_are_refused(parts):
    with pytest.raises(OptionError) as caught:
        split({"split": parts, "schedule": "off"})
    words = [f"'split' is {parts!r}", "'schedule' is 'off'", "the scheduler", "Leave 'sched"]
    assert all(word in str(caught.value) for word in words), caught.value


def test_digests_differ_by_the_number_of_chunks():
    whole, two, four = (PassOptions(extra={"split": n}).digest() for n in ("off", 2, 4))
    assert whole == PassOptions().digest()
    assert len({whole, two, four}) == 3
