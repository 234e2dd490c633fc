"""The parts, in the order in which they run."""

from __future__ import annotations

from comparison import quick
from comparison.part import Part

PARTS = {
    part.name: part
    for part in (
        Part("corpus", "comparison.corpus", "corpus, aot_eager", quick.CORPUS),
        Part("lowering", "comparison.corpus", "corpus, Inductor's lowering"),
        Part("lowering-rank-1", "comparison.corpus", "the same, as rank 1", quick.LOWERING),
        Part("operators", "comparison.operators", "higher-order operators", quick.OPERATORS),
        Part("features", "comparison.features", "torch without distribution", quick.FEATURES),
        Part("code", "comparison.features", "ahead of time, with C++", seconds=400.0),
        Part("dtensors", "comparison.dtensors", "DTensor programs, all ranks", quick.DTENSORS),
        Part("models", "comparison.models", "transformers with a plan", quick.MODELS, theirs=True),
        Part("models-compiled", "comparison.models", "the same, compiled", lives=20, theirs=True),
        Part("models-ranks", "comparison.gloo", "ten on gloo ranks", seconds=240.0, theirs=True),
        Part("dtensors-ranks", "comparison.gloo", "the same, gloo ranks", quick.RANKS, 240.0),
    )
}
