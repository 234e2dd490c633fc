"""The demo as a user runs it, small."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "tools" / "demo"
VARIANTS = {"eager", "upstream", "ours"}


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory):
    """For demos that train the same model: each finds what the one before has compiled."""
    return str(tmp_path_factory.mktemp("cache"))


def demo(*arguments, timeout_s=60, **environment):
    """Demos have caches of their own, if ``environment`` says nothing else; kernels of one text
    are built once in a run of all tests.
    """
    command = [sys.executable, str(DEMO / "main.py"), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as cache:
        own = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": cache}
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **own, **environment},
        )
        try:
            out, errors = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
    assert namespaces_of(process.pid) == set()
    return subprocess.CompletedProcess(command, process.returncode, out, errors)


def namespaces_of(pid):
    """What a demo left behind; others run beside it."""
    if why_no_link():
        return set()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {name for name in listed.stdout.split() if name in (f"dd{pid}a", f"dd{pid}b")}


@pytest.mark.main
@pytest.mark.slow
def test_training_on_two_ranks(tmp_path, one_cache):
    done = demo(
        *("--steps", 3, "--layers", 1, "--hidden", 128, "--sequence", 64),
        *("--topology", "h100x8", "--json", "--out", tmp_path, "--deadline", 380),
        timeout_s=400,
        TORCHINDUCTOR_CACHE_DIR=one_cache,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["graph_breaks"] == 0 and found["graphs"] == 1
    assert found["max_loss_diff"] < 1e-5 and found["max_loss_diff_upstream"] < 1e-5
    assert found["losses"].keys() == VARIANTS == found["step_ms"].keys()
    eager = found["losses"]["eager"]
    assert len(eager) == 3 and eager[2] < eager[0]  # it learns
    # Output of attention and MLP, logits; in the backward one for each of q, k, v, gate, up, and
    # the logits' input. The scheduler merges some of the backward's, and adds none.
    launches = found["launches_by_kind"]
    assert launches["upstream"] == launches["eager"]
    assert found["launches"] == sum(launches["ours"].values())
    assert launches["ours"].keys() == launches["eager"].keys()
    assert all(launches["ours"][kind] <= count for kind, count in launches["eager"].items())
    assert launches["ours"]["all_reduce"] >= 6
    assert 0 <= found["exposed_us_after"] <= found["exposed_us_before"]
    assert found["topology"] == "h100x8"
    assert "<html" in Path(found["report"]).read_text().lower()
    assert json.loads(Path(found["trace"]).read_text())["traceEvents"]


@pytest.mark.slow
@pytest.mark.sweep  # conformance and README's example show FSDP2 on ranks
def test_data_parallel_on_two_ranks(tmp_path):
    done = demo(
        *("--parallel", "fsdp", "--steps", 3, "--layers", 1, "--hidden", 128, "--sequence", 64),
        *("--json", "--out", tmp_path, "--deadline", 380),
        timeout_s=400,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["graph_breaks"] == 0 and found["graphs"] == 1
    assert found["graph_breaks_upstream"] > 0  # fully_shard's hooks
    assert found["max_loss_diff"] < 1e-5
    assert found["launches_by_kind"]["ours"].keys() == {"all_gather", "reduce_scatter"}


@pytest.fixture
def load(monkeypatch):
    """A module of the demo, by name."""
    monkeypatch.syspath_prepend(str(DEMO))
    return lambda name: runpy.run_path(str(DEMO / f"{name}.py"))


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--hidden", "100"], ["--no-such"]])
def test_a_bad_command_line_is_refused(arguments, load, capsys):
    with pytest.raises(SystemExit) as ended:
        load("main")["parse"](arguments)
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err


def test_batches_are_text_and_no_byte_twice(load):
    data = load("data")
    batches = data["text_batches"](data["Sizes"](batch=2, sequence=64), 3)
    assert [tuple(batch.shape) for batch in batches] == [(2, 64)] * 3
    text = bytes(b for batch in batches for b in batch.flatten().tolist())
    assert text.decode().count("\n") > 3 and batches[0].tolist() != batches[1].tolist()
    with pytest.raises(SystemExit, match="the sources of Python hold"):
        data["text_batches"](data["Sizes"](), 10**6)


def why_no_link():
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    if absent := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"{' and '.join(absent)} absent (iproute2)"
    return ""


@pytest.mark.slow
@pytest.mark.sweep  # each night runs it
def test_two_hosts_on_a_slow_link():
    if reason := why_no_link():
        pytest.skip(reason)
    done = demo("--link", "1gbit", "--rounds", 3, "--json", "--deadline", 280, timeout_s=300)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["label"] == "real processes, emulated link"
    assert found["numbers_equal"] and found["order_kept"] and found["rounds"] == 3
    # Eight shards of 2 MiB take 134 ms at 1 Gbit/s: the link is really that slow.
    assert found["step_ms"]["communication"] > 134
    assert found["predicted_ms"]["ours"] < found["predicted_ms"]["upstream"]


@pytest.mark.slow
@pytest.mark.sweep  # each night runs it
def test_training_on_a_slow_link(tmp_path, one_cache):
    if reason := why_no_link():
        pytest.skip(reason)
    alone = tmp_path / "alone.json"
    done = demo(
        *("--link", "200mbit", "--train", "--steps", 6, "--layers", 1, "--hidden", 128),
        *("--sequence", 64, "--alone", alone, "--json", "--out", tmp_path, "--deadline", 280),
        timeout_s=400,
        TORCHINDUCTOR_CACHE_DIR=one_cache,
    )
    if done.returncode == 2:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["topology"] == "this link"
    assert (
        found["timed_steps"] == 3 and len(found["ratio_quartiles"]) == 2
    )  # none of a turn's first
    predicted = found["predicted_forward_backward"]
    # Eight launches of 128 KiB take 42 ms at 200 Mbit/s: the link was measured, and is really that
    # slow.
    assert predicted["communication_alone_ms"] > 25
    assert predicted["compute_alone_ms"] == json.loads(alone.read_text())["ms"]
    assert predicted["longer_alone_ms"] <= predicted["ours_ms"] * 1.05


@pytest.mark.parametrize(
    ("rate", "path", "message"),
    [
        ("fast", None, "--link fast is no rate that tc knows"),
        ("1gbit", "/nowhere", "apt-get install iproute2" if os.geteuid() == 0 else "needs root"),
    ],
)
def test_a_link_that_cannot_be_made_is_a_sentence(rate, path, message, load, monkeypatch):
    link = load("link")
    if path:
        monkeypatch.setenv("PATH", path)
    with pytest.raises(link["CannotEmulate"], match=message), link["two_hosts"](rate):
        pass
