"""What each pass did to a graph, as logged and as files."""

import logging
import re

import pytest
import torch
from expecttest import TestCase

from inductor_passes import PassOptions, run_passes
from inductor_passes.report.logs import FOLDER
from inductor_passes.testing import trace
from inductor_passes.torch_compat import dynamo

OPTIONS = PassOptions(topology="h100x8", passes=("share_launches", "merge_tiny"))


def gathered_twice(x):
    gather = torch.ops._c10d_functional.all_gather_into_tensor
    wait = torch.ops._c10d_functional.wait_tensor
    one, other = wait(gather(x, 8, "0")), wait(gather(x, 8, "0"))
    return one.sin() + other


@pytest.fixture
def logged(monkeypatch):
    """Lines of the log, which is on."""
    lines = []
    own = logging.getLogger("test_pass_log")
    own.setLevel(logging.DEBUG)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    own.handlers = [handler]
    monkeypatch.setattr(dynamo, "artifact_logger", lambda module, artifact: own)
    return lines


def without_times(lines):
    return "\n".join(re.sub(r"\(ran, .*", "(ran)", line) for line in lines)


class TestLines(TestCase):
    @pytest.fixture(autouse=True)
    def _logged(self, logged):
        self.logged = logged

    def test_each_pass_is_told_with_its_lines(self):
        run_passes(trace(gathered_twice, (4, 4)), OPTIONS, graph_id="0/0:forward")
        self.assertExpectedInline(
            without_times(self.logged),
            """\
0/0:forward: 01 share_launches: 1 launches_removed, 64 bytes_saved (ran)
0/0:forward: 01 -all_gather_into_tensor_1: [32, 4] = all_gather_into_tensor(x_1, 8, 0)
0/0:forward: 01 -wait_tensor_1: [32, 4] = wait_tensor(all_gather_into_tensor_1)
0/0:forward: 01 -add: [32, 4] = add(sin, wait_tensor_1)
0/0:forward: 01 +add: [32, 4] = add(sin, wait_tensor)
0/0:forward: 02 merge_tiny: nothing to do (ran)""",
        )


def test_files_hold_the_graph_before_and_after(monkeypatch, tmp_path):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    run_passes(trace(gathered_twice, (4, 4)), OPTIONS, graph_id="0/0:forward")
    (folder,) = (tmp_path / "rank0").iterdir()
    assert folder.name == "0_0_forward"
    found = {path.name: path.read_text() for path in folder.iterdir()}
    assert sorted(found)[:3] == [
        "00_program.txt",
        "01_share_launches.diff",
        "01_share_launches.txt",
    ]
    assert found["00_program.txt"].count("all_gather_into_tensor(") == 2
    assert found["01_share_launches.txt"].count("all_gather_into_tensor(") == 1
    assert found["01_share_launches.diff"].startswith("-all_gather_into_tensor_1: [32, 4]")


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER, str(tmp_path / "file"))
    run_passes(trace(gathered_twice, (4, 4)), OPTIONS)
    (warning,) = [
        r.getMessage() for r in caplog.records if "could not be written" in r.getMessage()
    ]
    assert FOLDER in warning


def test_nothing_is_dumped_where_nobody_asks(monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    assert not logging.getLogger("inductor_passes.report.logs").isEnabledFor(logging.DEBUG)
    monkeypatch.setattr("inductor_passes.report.logs.dump", lambda graph: pytest.fail("dumped"))
    run_passes(trace(gathered_twice, (4, 4)), OPTIONS)
