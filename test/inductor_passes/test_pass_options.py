import json

import pytest

from inductor_passes import PassOptions
from inductor_passes.errors import OptionError, TopologyError
from inductor_passes.pass_options import split


def test_ours_and_inductors_are_told_apart():
    own, inductor = split(
        {"disable": "merge_tiny", "exact": True, "max_autotune": True, "triton.cudagraphs": False}
    )
    assert own == PassOptions(disable=("merge_tiny",), exact=True)
    assert inductor == {"max_autotune": True, "triton.cudagraphs": False}


def test_dashes_are_taken_as_upstream_takes_them():
    assert split({"max-autotune": True})[1] == {"max_autotune": True}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"topolgy": "h100x8"}, ["Unknown option 'topolgy'", "topology", "compile"]),
        ({"disable": ["merge"]}, ["no pass named 'merge'", "merge_tiny", "pin_order"]),
        ({"passes": "order"}, ["no pass named 'order'", "schedule"]),
        ({"passes": 3}, ["'passes' is 3", "list of pass names"]),
        ({"exact": "yes"}, ["'exact' is 'yes'", "True or False"]),
        ({"schedule": "best"}, ["'schedule' is 'best'", "'off'"]),
        ({"report": 1}, ["'report' is 1", "path"]),
    ],
)
def test_a_bad_option_gets_an_error_that_lists_the_known(given, words):
    with pytest.raises(OptionError) as caught:
        split(given)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_bad_topology_is_refused_before_anything_compiles(tmp_path):
    with pytest.raises(TopologyError, match=r"nowhere\.json"):
        split({"topology": tmp_path / "nowhere.json"})
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({"name": "x"}))
    with pytest.raises(TopologyError, match=r"broken\.json"):
        split({"topology": broken})


def test_the_report_folder_does_not_change_the_digest():
    assert PassOptions(report="a").digest() == PassOptions().digest()
    assert PassOptions(exact=True).digest() != PassOptions().digest()
