"""The parts, in the order in which they run."""

from __future__ import annotations

from beside_stock import quick
from beside_stock.part import Part

PARTS = {
    part.name: part
    for part in (
        Part("corpus", "beside_stock.corpus", "corpus, aot_eager", quick.CORPUS),
        Part("lowering", "beside_stock.corpus", "corpus, Inductor's lowering"),
        Part("lowering-rank-1", "beside_stock.corpus", "the same, as rank 1", quick.LOWERING),
        Part("operators", "beside_stock.operators", "higher-order operators", quick.OPERATORS),
        Part("features", "beside_stock.features", "torch without distribution", quick.FEATURES),
        Part("code", "beside_stock.features", "ahead of time, with C++", seconds=400.0),
        Part("dtensors", "beside_stock.dtensors", "DTensor programs, all ranks", quick.DTENSORS),
        Part(
            "models", "beside_stock.models", "transformers with a plan", quick.MODELS, theirs=True
        ),
        Part("models-compiled", "beside_stock.models", "the same, compiled", lives=20, theirs=True),
        Part("models-ranks", "beside_stock.gloo", "ten on gloo ranks", seconds=240.0, theirs=True),
        Part("dtensors-ranks", "beside_stock.gloo", "the same, gloo ranks", quick.RANKS, 240.0),
    )
}
