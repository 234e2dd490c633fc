"""Gradients of several backward passes under FSDP2: those that are reduced later, in both modes
and orders.
"""

import functools

import torch
from beside_eager import MIXED, Pair, adamw, grid, micro_batches, program, train
from fsdp2_programs import sharded


def sync_last(model, is_last):
    model.set_requires_gradient_sync(is_last)


def say_last(model, is_last):
    sync_last(model, is_last)
    model.set_is_last_backward(is_last)


def all_reduce_last(model, is_last):
    model.set_requires_all_reduce(is_last)


@functools.cache
def resharding():
    # Reduced, kept for later, and reduced with what was kept.
    return Pair(sharded(), unequal=True, graphs=3)


@functools.cache
def hybrid():
    return Pair(sharded(mesh=grid()), unequal=True, graphs=3)


def nothing(model, is_last):
    pass


@program(2)
def reduced_each_time():
    resharding().train(micro_batches(nothing, "cc"), mixed=MIXED)


@program(2)
def synchronised_last():
    resharding().train(micro_batches(sync_last, "cc"), mixed=MIXED)


@program(2, sweep=True)
def synchronised_last_eager_first():
    resharding().train(micro_batches(sync_last, "ec"))


@program(2)
def synchronised_last_compiled_first():
    resharding().train(micro_batches(sync_last, "ce"))


@program(2, sweep=True)
def last_backward_said():
    resharding().train(micro_batches(say_last, "ec"), optimizer=adamw)


@program(4)
def all_reduced_last_eager_first():
    step = micro_batches(all_reduce_last, "ec")
    hybrid().train(step)


@program(4, sweep=True)
def all_reduced_last_compiled_first():
    step = micro_batches(all_reduce_last, "ce")
    train(sharded(mesh=grid()), step=step, dtype=torch.float64, graphs=2)


@program(4, sweep=True)
def all_reduced_last():
    hybrid().train(micro_batches(all_reduce_last, "cc"), mixed=MIXED)
