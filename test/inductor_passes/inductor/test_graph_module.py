"""``communication_pass``: the passes in the pass list of another compiler."""

import expecttest
import pytest
import torch
import torch.distributed._functional_collectives as fc
from torch.fx.experimental.proxy_tensor import make_fx

import inductor_passes
from inductor_passes.errors import GroupError, OptionError, PreconditionError
from inductor_passes.inductor.graph_module import communication_pass
from inductor_passes.report import recorder
from inductor_passes.testing import dump, fake_group, run_on_ranks, trace


def gathered_weight(x, w):
    w_full = fc.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(w, 4, "0"))
    return (x @ x) @ w_full


def module():
    """As make_fx has it: the gather is waited for at once."""
    return make_fx(gathered_weight, tracing_mode="fake")(
        torch.randn(512, 512), torch.randn(128, 512)
    )


def remove_dead(gm, example_inputs):
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm


class TestPassList(expecttest.TestCase):
    def test_a_graph_in_a_list_of_passes(self):
        with fake_group(4):
            gm = module()
            before = dump(gm.graph)
            for pass_ in (
                remove_dead,
                communication_pass,
                remove_dead,
            ):
                gm = pass_(gm, [])
            assert isinstance(gm, torch.fx.GraphModule)
        self.assertExpectedInline(
            before,
            """\
x_1: [512, 512]
w_1: [128, 512]
all_gather_into_tensor: [512, 512] = all_gather_into_tensor(w_1, 4, 0)
wait_tensor: [512, 512] = wait_tensor(all_gather_into_tensor)
mm: [512, 512] = mm(x_1, x_1)
mm_1: [512, 512] = mm(mm, wait_tensor)
return mm_1""",
        )
        self.assertExpectedInline(
            dump(gm.graph),
            """\
x_1: [512, 512]
w_1: [128, 512]
all_gather_into_tensor: [512, 512] = all_gather_into_tensor(w_1, 4, 0)
mm: [512, 512] = mm(x_1, x_1)
wait_tensor: [512, 512] = wait_tensor(all_gather_into_tensor)
mm_1: [512, 512] = mm(mm, wait_tensor)
return mm_1""",
        )


def test_the_module_runs_what_the_graph_says():
    with fake_group(4):
        gm = module()
        inputs = [[torch.randn(8, 8) for _ in range(4)], [torch.randn(2, 8) for _ in range(4)]]
        expected = run_on_ranks(gm.graph, *inputs)
        found = run_on_ranks(communication_pass(gm).graph, *inputs)
        assert "wait_tensor" in gm.code
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_it_can_be_found_by_its_name():
    assert inductor_passes.communication_pass is communication_pass
    assert communication_pass.__name__ == "communication_pass"


def test_graphs_are_recorded_each_by_itself():
    with fake_group(4), recorder.records_of_block() as found:
        for phase in ("forward", "backward", "inference"):
            communication_pass(module(), phase=phase)
    assert [record.phase for record in found] == ["forward", "backward", "inference"]
    assert len({record.graph_id.partition(":")[0] for record in found}) == 3
    assert {record.cache for record in found} == {None}
    assert not any("control_deps" in str(record.order) for record in found)


def test_a_report_is_written(tmp_path):
    with fake_group(4):
        communication_pass(module(), options={"report": tmp_path})
    assert (tmp_path / "report.rank0.json").exists()


def test_a_graph_without_launches_is_left_alone():
    graph = trace(lambda x: x @ x, [4, 4])
    gm = torch.fx.GraphModule({}, graph)
    before = dump(gm.graph)
    assert communication_pass(gm) is gm
    assert dump(gm.graph) == before


def test_values_come_from_the_example_inputs():
    with fake_group(4):
        gm = module()
        for node in gm.graph.nodes:
            node.meta.pop("val", None)
        with pytest.raises(
            PreconditionError, match=r"no meta\['val'\], and 0 example inputs for 2"
        ):
            communication_pass(gm)
        communication_pass(gm, [torch.randn(512, 512), torch.randn(128, 512)])
    shapes = {n.name: tuple(n.meta["val"].shape) for n in gm.graph.nodes if "val" in n.meta}
    assert shapes["all_gather_into_tensor"] == (512, 512)


def test_what_it_refuses():
    with fake_group(4):
        gm = module()
    with pytest.raises(GroupError, match="does not exist"):
        communication_pass(gm)
    with pytest.raises(OptionError, match="got the option 'max_autotune'"):
        communication_pass(gm, options={"max_autotune": True})
    with pytest.raises(OptionError, match="got the phase 'joint'"):
        communication_pass(gm, phase="joint")
