"""The README's example runs as it stands there, and its report appears where it says."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_every_option_is_documented():
    from dynamo_dist.graph_compile import register_options
    from inductor_passes.pass_options import own_keys

    register_options()
    table = (README.parent / "docs" / "reference" / "options.md").read_text()
    assert [key for key in own_keys() if f"`{key}`" not in table] == []


@pytest.mark.main
@pytest.mark.slow
def test_the_example(tmp_path, torchrun):
    (example,) = re.findall(r"```python\n(# train\.py.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    done = torchrun("train.py", ranks=4, timeout=400, cwd=tmp_path)
    losses = re.findall(r"^step \d: loss (\S+), eager mode (\S+)$", done.stdout, re.MULTILINE)
    assert len(losses) == 4
    assert all(float(loss) == pytest.approx(float(eager), abs=2e-5) for loss, eager in losses)
    assert "Traceback" not in done.stderr
    written = {path.name for path in (tmp_path / "out").iterdir()}
    for rank in range(4):
        assert {f"report.rank{rank}.html", f"report.rank{rank}.json"} <= written
        assert f"trace.rank{rank}.json" in written
