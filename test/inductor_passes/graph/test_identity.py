"""A graph's name: the same for the same program, another for another size, operator or order of inputs."""

import torch
import torch.distributed._functional_collectives as funcol

from inductor_passes.graph.identity import digest_of_graph
from inductor_passes.testing import trace


def step(x, w):
    return torch.relu(x @ funcol.wait_tensor(funcol.all_gather_tensor(w, 0, "0")))


def other(x, w):
    return torch.sigmoid(x @ funcol.wait_tensor(funcol.all_gather_tensor(w, 0, "0")))


def rows(start):
    return lambda x: x.narrow(0, start, 2) * 2


def test_same_program_same_name():
    assert digest_of_graph(trace(step, [4, 16], [2, 8])) == digest_of_graph(
        trace(step, [4, 16], [2, 8])
    )


def test_other_sizes_and_operators_have_other_names():
    names = {
        digest_of_graph(trace(step, [4, 16], [2, 8])),
        digest_of_graph(trace(step, [8, 16], [2, 8])),
        digest_of_graph(trace(other, [4, 16], [2, 8])),
        digest_of_graph(trace(step, [4, 16], [2, 8], dtype=torch.float64)),
    }
    assert len(names) == 4


def test_where_a_rank_stands_is_no_part_of_the_name():
    assert digest_of_graph(trace(rows(0), [8, 4])) == digest_of_graph(trace(rows(4), [8, 4]))
