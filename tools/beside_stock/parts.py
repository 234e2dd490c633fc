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
    )
}
