"""Programs before AOTAutograd's trace: of which of them one rank may speak for the others, and
what tells them apart.
"""

import pytest
import torch
from torch import fx, nn

from inductor_passes.inductor.shared_trace import UntracedProgram, draws_numbers
from inductor_passes.torch_compat import rank_reads


@torch.library.custom_op("test_untraced::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def helper(x):
    return x + 1


fx.wrap("helper")


class OwnTensor(torch.Tensor):
    pass


def known(function, *inputs):
    return UntracedProgram(fx.symbolic_trace(function), inputs or (torch.ones(2),)).is_known()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: torch.sin(x) @ x.t() + 1, True),
        (lambda x: torch.ops.aten.sin.default(x), True),
        (lambda x: torch.ops.aten.sin(x), True),
        (nn.Sequential(nn.Linear(2, 2)), False),  # a module's code, which Dynamo has inlined
        (lambda x: torch.ops.test_untraced.twice.default(x), False),
        (lambda x: torch.ops.test_untraced.twice(x), False),
        (lambda x: helper(x), False),
    ],
)
def test_nothing_of_users_runs_in_a_known_program(function, expected):
    assert known(function) is (expected and rank_reads.can_notice())


def test_inputs_of_a_type_of_the_users_are_not_known():
    function, x = torch.sin, torch.ones(2)
    assert known(lambda x: function(x), x, nn.Parameter(x), 3, None) is rank_reads.can_notice()
    assert not known(lambda x: function(x), x.as_subclass(OwnTensor))


def test_so_is_a_graph_inside():
    inner = fx.symbolic_trace(lambda x: torch.ops.test_untraced.twice(x))
    outer = fx.symbolic_trace(lambda x: torch.sin(x))
    outer.add_module("inner", inner)
    assert not UntracedProgram(outer, [torch.ones(2)]).is_known()


def test_what_torchs_key_leaves_out_is_in_the_digest():
    graph = fx.symbolic_trace(lambda x: x)
    x = torch.ones(2, 3)
    variants = [
        (x, "key", "fact"),
        (x, "other", "fact"),
        (x, "key", "other"),
        (torch.ones(3, 2), "key", "fact"),
        (x.t().contiguous().t(), "key", "fact"),
        (x.double(), "key", "fact"),
        (x.clone().requires_grad_(), "key", "fact"),
    ]
    digests = [UntracedProgram(graph, [each]).digest(*rest) for each, *rest in variants]
    assert len(set(digests)) == len(variants)
    assert digests[0] == UntracedProgram(graph, [x.clone()]).digest("key", "fact")


def test_drawing_operators_are_found_in_graphs_inside_too():
    outer = fx.symbolic_trace(lambda x: torch.ops.aten.sin.default(x))
    assert not draws_numbers(outer)
    inner = fx.symbolic_trace(lambda x: torch.ops.aten.rand_like.default(x))
    outer.add_module("inner", inner)
    assert draws_numbers(outer)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_draws_for_its_dropout_alone(dropout):
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    by_place = fx.symbolic_trace(lambda x: attend(x, x, x, dropout))
    by_name = fx.symbolic_trace(lambda x: attend(x, x, x, dropout_p=dropout))
    assert draws_numbers(by_place) == draws_numbers(by_name) == (dropout > 0)
    assert not draws_numbers(fx.symbolic_trace(lambda x: attend(x, x, x)))
