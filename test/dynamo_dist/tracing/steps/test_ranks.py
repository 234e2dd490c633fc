"""Whole steps of tensor parallel, FSDP2 and DDP modules on two and four ranks, beside eager."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("ranks_worker.py")


@pytest.mark.parametrize("wrapper", ["tp", "fsdp2", pytest.param("ddp", marks=pytest.mark.main)])
def test_step_is_one_graph_with_eagers_numbers_and_launches(on_ranks, wrapper):
    on_ranks(WORKER, 2, wrapper)


# A break parts the step in the same place under each wrapper.
@pytest.mark.parametrize(
    "wrapper", ["ddp", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("tp", "fsdp2"))]
)
def test_step_with_a_break_has_eagers_numbers(on_ranks, wrapper):
    on_ranks(WORKER, 2, wrapper, "broken")


@pytest.mark.parametrize("wrapper", ["fsdp2", pytest.param("ddp", marks=pytest.mark.sweep)])
def test_a_call_may_be_a_micro_batch_that_is_not_reduced(on_ranks, wrapper):
    on_ranks(WORKER, 2, wrapper, "in turns")


def test_ranks_with_unlike_memory_budgets_keep_the_same(on_ranks):
    on_ranks(WORKER.with_name("budget_worker.py"), 2)


def test_code_from_a_cache_gathers_as_the_ranks_of_this_job_do(on_ranks):
    for job in ("cold", "warm", "unlike"):
        on_ranks(WORKER.with_name("budget_cache_worker.py"), 2, job)


def test_states_of_ranks_with_unlike_batches_wait_on_the_host(on_ranks):
    on_ranks(WORKER.with_name("states_worker.py"), 2)


def test_live_tensors_within_budgets_are_as_predicted(on_ranks):
    on_ranks(WORKER.with_name("peak_worker.py"), 2)


# Each is a compile for its own call: neither loses its plan to the other.
@pytest.mark.parametrize("first", ["evaluation", pytest.param("step", marks=pytest.mark.sweep)])
def test_evaluation_and_step_both_run_in_the_agreed_order(on_ranks, first):
    on_ranks(WORKER.with_name("evaluation_worker.py"), 2, first)


@pytest.mark.parametrize("wrapper", [pytest.param("hsdp", marks=pytest.mark.sweep), "fsdp2 x tp"])
def test_step_on_a_mesh_of_two_by_two(on_ranks, wrapper):
    on_ranks(WORKER, 4, wrapper)
