"""The parts, in the order in which they run."""

from __future__ import annotations

from beside_stock.part import Part

PARTS = {
    part.name: part
    for part in (
        Part("corpus", "beside_stock.corpus", "corpus, aot_eager", quick=30),
        Part("lowering", "beside_stock.corpus", "corpus, Inductor's lowering", quick=12),
        Part("lowering-rank-1", "beside_stock.corpus", "the same, as rank 1", quick=8),
        Part("operators", "beside_stock.operators", "higher-order operators", quick=16),
        Part("features", "beside_stock.features", "torch without distribution", quick=20, lives=60),
        Part("code", "beside_stock.features", "ahead of time, with C++", seconds=400.0),
        Part("dtensors", "beside_stock.dtensors", "DTensor programs, all ranks", quick=40),
        Part("models", "beside_stock.models", "transformers with a plan", quick=6, lives=60),
        Part("models-compiled", "beside_stock.models", "the same, compiled", lives=20),
        Part("models-ranks", "beside_stock.models_ranks", "ten on gloo ranks", seconds=240.0),
    )
}
