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
        Part(
            "corpus-ranks", "comparison.corpus", "corpus, gloo ranks", seconds=60.0, on_ranks=True
        ),
        Part("operators", "comparison.operators", "higher-order operators", quick.OPERATORS),
        Part("strategies", "comparison.strategies.part", "operators on DTensors", seconds=300.0),
        Part("features", "comparison.programs", "torch without distribution", quick.FEATURES),
        Part("code", "comparison.programs", "ahead of time, with C++", seconds=400.0),
        Part("dtensors", "comparison.programs", "DTensor programs, all ranks", quick.DTENSORS),
        Part(
            "dtensors-ranks",
            "comparison.programs",
            "collectives of DTensors, gloo ranks",
            quick.RANKS,
            on_ranks=True,
        ),
        Part(
            "graphs",
            "comparison.graphs",
            "DTensor programs in graphs, gloo ranks",
            seconds=20.0,
            explained=True,
            on_ranks=True,
        ),
        Part("models", "comparison.models", "transformers with a plan", quick.MODELS, theirs=True),
        Part("models-compiled", "comparison.models", "the same, compiled", lives=20, theirs=True),
        Part(
            "models-ranks",
            "comparison.models",
            "ten on gloo ranks",
            seconds=200.0,
            theirs=True,
            on_ranks=True,
        ),
    )
}
