"""Artefacts without a compile: entries that torch's caches take, and what a process has noted of its compiles."""

import sys
from pathlib import Path

import pytest
from torch._dynamo import convert_frame

from dynamo_dist.saved import compiles, frames
from dynamo_dist.saved.fingerprint import of_options
from dynamo_dist.torch_compat.inductor import saved
from inductor_passes.pass_options import PassOptions
from inductor_passes.reporting import recorder

sys.path.insert(0, str(Path(__file__).parent))
ENTRIES = [
    saved.Entry("aot_autograd", "akey", b"first"),
    saved.Entry("aot_autograd", "akey", b"second"),
    saved.Entry("file", "ab/cab.main.so", b"library"),
]


@pytest.fixture
def process(tmp_path, monkeypatch):
    """A process that compiled; ``fresh()`` is another one, with empty caches; both have ``cache``."""
    cache = tmp_path / "cache"

    def fresh():
        for name in ("_noted", "_loaded", "_from"):
            monkeypatch.setattr(compiles, name, [])
        for name, held in (("_kept", []), ("_loaded", {}), ("_from", []), ("_backends", set())):
            monkeypatch.setattr(frames, name, held)
        monkeypatch.setattr(recorder, "_met", set())
        monkeypatch.setattr(recorder, "_loaded", {})

    fresh()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(saved, "recorded", lambda: list(ENTRIES))
    compiles._noted.append({"options": of_options(PassOptions(), {}), "meshes": ["cpu 2 ('tp',)"]})
    fresh.cache = cache
    return fresh


@pytest.fixture
def traced(monkeypatch):
    """Frames that were traced, as a list that grows."""
    found, stock = [], convert_frame.trace_frame
    for name, held in (("_kept", []), ("_loaded", {}), ("_from", []), ("_backends", set())):
        monkeypatch.setattr(frames, name, held)

    def trace_frame(code, *args, **kwargs):
        found.append(code)
        return stock(code, *args, **kwargs)

    monkeypatch.setattr(convert_frame, "trace_frame", trace_frame)
    return found
