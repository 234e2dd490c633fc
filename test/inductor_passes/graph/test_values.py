"""Fake values that are worked out once: as the operators find them, in memory of their own."""

import torch

from inductor_passes.graph.edit import Values, emit
from inductor_passes.testing import trace

aten = torch.ops.aten


def emitted(calls, dynamic=False):
    graph = trace(lambda x, y: x + y, [4, 8], [4, 8], dynamic=dynamic)
    x = next(n for n in graph.nodes if isinstance(n.meta.get("val"), torch.Tensor))
    like = next(n for n in graph.nodes if n.op == "call_function")
    values = Values()
    with graph.inserting_before(like):
        return [emit(graph, target, (x, *args), like, None, values.of) for target, *args in calls]


def test_recorded_result_has_its_own_memory_and_equals_the_first():
    a, b = emitted([(aten.sum.dim_IntList, [1]), (aten.sum.dim_IntList, [1])])
    first, second = a.meta["val"], b.meta["val"]
    assert first is not second
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    assert type(first) is type(second) and first.fake_mode is second.fake_mode
    assert (first.shape, first.stride(), first.dtype, first.device) == (
        second.shape,
        second.stride(),
        second.dtype,
        second.device,
    )


def test_arguments_tell_values_apart():
    shapes = [n.meta["val"].shape for n in emitted([(aten.sum.dim_IntList, [d]) for d in (0, 1)])]
    assert shapes == [(8,), (4,)]
    one, true = emitted([(aten.add.Scalar, 1), (aten.add.Scalar, 1.0)])
    assert one.meta["val"].dtype == true.meta["val"].dtype == torch.float32


def test_views_share_the_memory_of_what_they_view():
    a, b = emitted([(aten.view.default, [32])] * 2)
    base = a.args[0].meta["val"].untyped_storage()._cdata
    assert {n.meta["val"].untyped_storage()._cdata for n in (a, b)} == {base}


def test_symbols_of_sizes_are_told_by_their_names():
    rows, columns = (
        each.meta["val"] for each in emitted([(aten.sum.dim_IntList, [d]) for d in (1, 0)], True)
    )
    again, _ = emitted([(aten.sum.dim_IntList, [1])] * 2, True)
    assert rows.shape != columns.shape and all(
        isinstance(s, torch.SymInt) for s in (*rows.shape, *again.meta["val"].shape)
    )
