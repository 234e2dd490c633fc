"""Layers that are the same: steps that read the same way from the same kind of steps.

Two steps are alike if op, shapes, choices and what they move agree and their inputs come from alike steps at the same
distance. A program of L equal layers then shows L runs of alike steps, forward and backward; the
inner ones are tied to the second, so that the plan of the first, the last and one inner layer is the plan
of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_dist.program import Program, stock_choice

# Shorter runs than this are no layers, and ties of them would save nothing.
LEAST_STEPS = 4


def roots(program: Program) -> list[int]:
    """For each step the step that it is tied to: itself, or an alike one of an earlier layer."""
    found = list(range(len(program.steps)))
    words = [_word(program, i) for i in range(len(program.steps))]
    split = _turn(program)
    for start, end in ((0, split), (split, len(words))):
        for first, period, count in _runs(words[start:end]):
            # Layers 0 and count - 1 meet what is not a layer: they stay free.
            for layer in range(2, count - 1):
                for i in range(period):
                    found[start + first + layer * period + i] = start + first + period + i
    return found


def _word(program: Program, index: int) -> object:
    step = program.steps[index]
    values = tuple(program.value(ref) for ref in step.inputs)
    stock, access = stock_choice(step), program.access(index)
    return step.kind, step.text, values, step.outputs, step.mesh, step.fixed, stock, access


def _turn(program: Program) -> int:
    """The first step of the backward: the first to read a source that is no input; else the end."""
    for i, step in enumerate(program.steps):
        for ref in step.inputs:
            if ref.step < 0 and not program.sources[-1 - ref.step].is_input and i > 0:
                return i
    return len(program.steps)


def _runs(words: Sequence[object]) -> list[tuple[int, int, int]]:
    """List the places where a block of words stands three or more times in a row: its start, length and count."""
    ids: dict[object, int] = {}
    sequence = [ids.setdefault(word, len(ids)) for word in words]
    found, at = [], 0
    while at < len(sequence):
        best = (0, 0)
        for period in range(LEAST_STEPS, (len(sequence) - at) // 3 + 1):
            if sequence[at] != sequence[at + period]:
                continue
            same = 0
            while at + period + same < len(sequence) and (
                sequence[at + same] == sequence[at + period + same]
            ):
                same += 1
            count = same // period + 1
            if count >= 3 and count * period > best[0] * max(best[1], 1):
                best = (count, period)
                break
        count, period = best
        if count:
            found.append((at, period, count))
            at += count * period
        else:
            at += 1
    return found
