"""Which table a place has: adopted, kept in a file, that of the rank that came first, or none."""

import dataclasses

import pytest
import torch.distributed as dist

from inductor_passes.agree import orders
from inductor_passes.agree.orders import Orders
from inductor_passes.attach import measured
from inductor_passes.attach.options import config_patches
from inductor_passes.errors import OptionError
from inductor_passes.machine.times.file import to_text
from inductor_passes.machine.times.times import GraphTimes, NodeTime, Times
from inductor_passes.pass_options import PassOptions
from inductor_passes.torch_compat import caches

GRAPH = GraphTimes("forward", {"mm": NodeTime("aten.mm.default", 1.0, 1.0)}, {})
OLD = Times("m", caches.torch_version(), 1, 20, {"g": GRAPH})
NEW = Times("m", caches.torch_version(), 1, 30, {"g": GRAPH})
MEASURED = PassOptions(costs="measured")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(caches, "cache_dir", lambda: str(tmp_path))
    measured.forget()
    yield
    measured.forget()


def times_in_options(place, own):
    return config_patches(own, {}, place=place)["post_grad_custom_post_pass"].attachment.times


def test_a_kept_table_counts_where_it_is_asked_for():
    measured.keep({"place": OLD})
    assert times_in_options("place", MEASURED) == OLD
    assert times_in_options("place", PassOptions()) is None
    assert times_in_options("elsewhere", MEASURED) is None
    assert times_in_options("", MEASURED) is None


def test_an_adopted_table_counts_before_a_kept_one_and_until_it_is_forgotten():
    measured.keep({"place": OLD})
    measured.adopt({"place": NEW})
    assert times_in_options("place", PassOptions()) == times_in_options("place", MEASURED) == NEW
    measured.forget()
    assert times_in_options("place", PassOptions()) is None


def test_the_table_is_part_of_the_cache_key():
    keys = set()
    for times in (OLD, NEW):
        measured.adopt({"place": times})
        pass_ = config_patches(PassOptions(), {}, place="place")["post_grad_custom_post_pass"]
        keys.add(pass_.uuid())
    assert len(keys) == 2


@pytest.mark.parametrize("mine", [None, OLD])
@pytest.mark.parametrize("theirs", [None, NEW])
def test_all_ranks_use_what_the_first_one_has(monkeypatch, mine, theirs):
    store = dist.HashStore()
    store.set("dynamo_dist/order/times/place", "-" if theirs is None else to_text(theirs))
    job = Orders(store, 1, None)
    monkeypatch.setattr(orders, "current", lambda: job)
    if mine is not None:
        measured.keep({"place": mine})
    assert measured.times_of("place", "measured") == theirs


def test_a_damaged_file_is_none_with_a_line(tmp_path, caplog):
    measured.keep({"place": OLD})
    with open(measured.path_of("place"), "a") as file:
        file.write("}")
    assert measured.times_of("place", "measured") is None
    (line,) = caplog.messages
    assert "not used" in line


def test_other_costs_are_refused():
    with pytest.raises(OptionError, match="'model', 'measured'"):
        PassOptions(costs="guessed")


def test_who_asks_before_there_is_a_graph_gets_what_all_graphs_show():
    assert measured.times_of(measured.EVERYWHERE, "model") is None
    measured.adopt(
        {"a": OLD, "b": dataclasses.replace(OLD, graphs={"other": GraphTimes("f", {}, {})})}
    )
    everywhere = measured.times_of(measured.EVERYWHERE, "model")
    assert set(everywhere.graphs) == {*OLD.graphs, "other"}
    assert set(measured.adopted()) == {"a", "b"}
    measured.keep(measured.adopted())
    measured.forget()
    assert measured.times_of(measured.EVERYWHERE, "measured") == everywhere
    assert not measured.is_asked()  # nothing was compiled so
    measured.adopt({"a": OLD, "b": dataclasses.replace(OLD, machine="another")})
    assert measured.times_of(measured.EVERYWHERE, "model") is None
