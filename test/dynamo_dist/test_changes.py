"""The list of what ``enable()`` changes in torch: whole, and with a reason for each change."""

import json

import pytest
import torch

from dynamo_dist import __main__, patches
from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import patching

NEWER = not torch.__version__.startswith("2.13.")


@pytest.fixture(scope="module")
def found():
    return patches.listed(DistConfig())


def test_each_change_that_is_applied_is_listed_and_none_other(found, enabled):
    places = [place for each in found for place in each.places]
    assert len(places) == len(patching._applied)
    assert not patching._applied[0].__dict__.get("makers")  # noted for the list alone


def test_each_says_how_and_by_which_function(found):
    assert all(len(each.how) > 20 and each.made_by for each in found)
    unexplained = [each.made_by for each in found if "What enabling does" in each.how]
    assert unexplained == []


def test_places_can_be_read(found):
    places = {place for each in found for place in each.places}
    assert (
        "torch.distributed.tensor._dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path"
        in (places)
    )
    assert (
        "aten.squeeze_.default" in places
        and "torch.distributed.distributed_c10d.all_reduce" in places
    )
    assert not [place for place in places if "0x" in place or place.isdigit()]


def test_attributes_named_are_there_while_enabled(found, enabled):
    attributes = [
        (patch.owner, patch.name) for patch in patching._applied if hasattr(patch, "owner")
    ]
    assert all(name in vars(owner) for owner, name in attributes)
    named = {place for each in found for place in each.places}
    assert {patches._place(patch) for patch in patching._applied} == named


def test_versions_are_read_from_the_docstring(found):
    (hearing,) = [
        each for each in found if each.made_by == "torch_compat.dynamo_frames.ask_before_giving_up"
    ]
    assert hearing.versions == "2.13 to 2.15"
    assert hearing.why.startswith("Compiled, or in eager mode")


def test_kinds_sum_up_what_is_listed_but_our_own_state(found):
    kinds = patches.kinds(DistConfig())
    own = [each for each in found if each.what == "own state"]
    assert 0 < len(own) < 8
    assert sum(kind.places for kind in kinds) == sum(
        len(each.places) for each in found if each not in own
    )
    assert {kind.what for kind in kinds} == {"patch", "setting"}


def test_each_kind_has_its_loss_and_the_worst_come_first():
    kinds = patches.kinds(DistConfig())
    losses = [lost for lost, _ in patches.LOSSES.values()]
    assert [kind.lost for kind in kinds] == [
        each for each in losses if each in {k.lost for k in kinds}
    ]
    makers = {".".join(maker.split(".")[-2:]) for kind in kinds for maker in kind.made_by}
    right_by_itself = {"aot_runtime.write_to_pending_inputs"} if NEWER else set()
    assert makers | right_by_itself >= patches.LOSSES.keys()
    assert len(kinds) - sum(kind.what == "setting" for kind in kinds) <= 65


def test_the_command(capsys, monkeypatch):
    name = (
        "torch.distributed.tensor._dispatch.OpDispatcher._propagate_op_sharding_dispatch_slow_path"
    )
    monkeypatch.setenv("COLUMNS", "60")
    assert __main__.main(["doctor", "--changes", "--all"]) == 0
    detail = capsys.readouterr().out
    assert name in detail and "aten.squeeze_.default" in detail  # whole, whatever the width
    assert __main__.main(["doctor", "--changes"]) == 0
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 60
    assert __main__.main(["doctor", "--changes", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert set(listed[0]) == {
        "place",
        "places",
        "lost",
        "upstream",
        "versions",
        "made_by",
        "what",
    }
    assert len(told.splitlines()) <= 3 + len(listed)  # a line each, and the heading
    assert not [each["made_by"] for each in listed if not (each["lost"] and each["upstream"])]
    patches = sum(each["what"] == "patch" for each in listed)
    assert f"enable() changes {patches} kinds of places" in " ".join(told.split())


def test_nothing_is_applied_by_listing(found):
    assert not patching.is_enabled()
    assert (
        torch.ops.aten.squeeze_.default
        not in torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers
    )
