"""Figures of graphs: computed once, shown wherever a report is."""

import pytest
import torch

from inductor_passes import PassOptions, run_passes
from inductor_passes.records import GraphRecord
from inductor_passes.report import figures
from inductor_passes.testing import fake_group, trace

c10d = torch.ops._c10d_functional


def gathered_weight(x, w):
    full = c10d.wait_tensor(c10d.all_gather_into_tensor(w, 8, "0"))
    return (x @ x) @ full


@pytest.fixture(autouse=True)
def group():
    with fake_group(8):
        yield


def record():
    graph = trace(gathered_weight, [16, 16], [2, 16])
    return run_passes(graph, PassOptions(topology="h100x8"))


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(figures, "_figures", dict(figures._figures))


def test_the_busiest_groups_link_is_the_sum_of_its_launches():
    found = record()
    (one,) = [figure for figure in found.figures if figure.name == "busiest group's link"]
    assert one.unit == "us"
    assert one.value == pytest.approx(sum(c.predicted_us for c in found.collectives))


@pytest.mark.usefixtures("kept")
def test_one_more_is_in_the_record_and_survives_json():
    figures.figure("nodes of one kind", "nodes")(lambda planned: 3)
    figures.figure("nothing to say", "nodes")(lambda planned: None)
    found = record()
    assert found.figures[-1].name == "nodes of one kind"
    assert GraphRecord.from_json(found.to_json()) == found
