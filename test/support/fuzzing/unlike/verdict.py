"""What came of a program, in one word and in some more."""

from __future__ import annotations

from dataclasses import dataclass

from fuzzing.unlike.launches import first_difference
from fuzzing.unlike.pool import Answers
from fuzzing.unlike.program import Program

from dynamo_dist.settings import agreement_seconds

CLASSES = (
    "ok",
    "cannot_follow",
    "mismatch",
    "hang",
    "crash",
    "error",
    "stall",
    "refused",
)
FAULTS = ("mismatch", "hang", "crash", "error", "stall")
# of the time for which ranks wait for each other: ranks that were idle for as long had waited in
# vain
STALL = 0.5

# What a rank says only because another one is gone.
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")


@dataclass(frozen=True, slots=True)
class Verdict:
    """``word``: one of ``CLASSES``. ``scheduled``: passes ran; ``reordered``: launches really
    differ from eager's order; ``cut``: a graph was cut into parts.
    """

    word: str
    why: str = ""
    scheduled: bool = False
    reordered: bool = False
    cut: bool = False


def judge(program: Program, answers: Answers) -> Verdict:
    """The verdict on what ranks said: what they raise before what they lack, that before
    numbers.
    """
    stages = " ".join(answers.last.values())
    if answers.errors or answers.died:
        if "job" not in stages:
            return Verdict("refused", _error(answers))
        return _failed(program, answers)
    if answers.late:
        at = ", ".join(f"rank {rank} in {step}" for rank, step in sorted(answers.last.items()))
        word = "hang" if "job" in stages else "refused"
        return Verdict(word, f"ranks {answers.late} did not end: {at}")
    parts = [answers.done[rank] for rank in range(program.ranks)]
    if unlike := first_difference([part.eager for part in parts]):
        return Verdict("refused", f"eager: {unlike}")
    did = {
        "scheduled": all(part.scheduled for part in parts),
        "reordered": any(part.reordered for part in parts),
        "cut": any(part.cut for part in parts),
    }
    for number in range(len(parts[0].compiled)):
        if unlike := first_difference([part.compiled[number] for part in parts]):
            return Verdict("mismatch", f"launches: {unlike}", **did)
    for rank, part in enumerate(parts):
        if part.mismatch:
            return Verdict("mismatch", f"rank {rank}: {part.mismatch}", **did)
    if answers.idle_s > STALL * (agreement_seconds() or 30.0):
        why = f"no rank did anything for {answers.idle_s:.0f} s"
        return Verdict("stall", why, **did)
    return Verdict("ok", "", **did)


def _failed(program: Program, answers: Answers) -> Verdict:
    if not answers.errors:
        return Verdict("crash", f"ranks {answers.died} died in {answers.last}")
    causes = {
        rank: error
        for rank, error in answers.errors.items()
        if not any(echo in error[1] for echo in _ECHOES)
    }
    if not causes and answers.died:
        return Verdict("crash", f"ranks {answers.died} died in {answers.last}")
    follows = ["CannotFollowError" in names for names, _, _ in causes.values()]
    if follows and all(follows) and program.may_not_follow:
        return Verdict("cannot_follow", _error(answers))
    return Verdict("error", _error(answers))


def _error(answers: Answers) -> str:
    said = [
        f"rank {rank} in {answers.last.get(rank, '?')}: {names[0]}: "
        f"{message[:600]}\n{trace[-2500:]}"
        for rank, (names, message, trace) in sorted(answers.errors.items())
    ]
    return "\n".join([*said, *([f"died: {answers.died}"] if answers.died else [])])
