"""Loops as users of transformers, accelerate and torchtitan write them, beside eager
mode."""

from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("loops_worker.py")


def test_trainers_loop_under_ddp(on_ranks):
    pytest.importorskip("transformers", reason="the extra demo brings it")
    on_ranks(WORKER, 2, "by_hand_ddp")


@pytest.mark.sweep
def test_trainers_loop_under_fsdp2(on_ranks):
    pytest.importorskip("transformers", reason="the extra demo brings it")
    on_ranks(WORKER, 2, "by_hand_fsdp2")


@pytest.mark.sweep
def test_loop_with_accelerate(on_ranks):
    pytest.importorskip("accelerate", reason="the extra demo brings it")
    on_ranks(WORKER, 2, "accelerate_ddp", "accelerate_accumulate", "accelerate_fsdp2")


@pytest.mark.sweep
def test_torchtitans_train_step_under_fsdp2(on_ranks):
    on_ranks(WORKER, 2, "torchtitan_fsdp2")


@pytest.mark.sweep
def test_torchtitans_train_step_under_fsdp2_and_tensor_parallelism(on_ranks):
    on_ranks(WORKER, 4, "torchtitan_fsdp2_and_tp")
