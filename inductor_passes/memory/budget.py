"""Read a memory budget: bytes, or a share of a device's memory."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from inductor_passes.errors import OptionError
from inductor_passes.pass_options import PassOptions
from inductor_passes.ranks.coordination import (
    Coordination,
    Steps,
    deadline_s,
    gather,
    missing_votes,
    propose,
    read,
    vote,
    wait,
)
from inductor_passes.torch_compat import c10d

log = logging.getLogger(__name__)

OPTION, OFFLOAD = "memory", "offload"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_TEXT = re.compile(r"\s*(?P<number>[0-9]+(?:\.[0-9]+)?)\s*(?P<unit>[KMGT]?i?B)\s*", re.IGNORECASE)
_FIX = "Give bytes as '60GiB' or a whole number, or a share of the device's memory such as 0.9."


def checked(value: Any, options: PassOptions) -> int | float | None:
    """Return a value of the option: bytes as int, a share as float, or None. Raises OptionError."""
    if value is None:
        return None
    given = value
    if isinstance(given, str) and (found := _TEXT.fullmatch(given)):
        value = int(float(found["number"]) * _UNITS[found["unit"].upper()])
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise OptionError(f"Option 'memory' is {given!r}.", "It is no size.", _FIX)
    if isinstance(value, float) and value > 1:
        raise OptionError(
            f"Option 'memory' is {value!r}.", "A share of a device's memory is at most 1.", _FIX
        )
    return value


def budget_bytes(budget: float, device: torch.device) -> int:
    """Return a budget in bytes. Raises OptionError for a share of a device whose memory nobody
    limits, and for more than a device has.
    """
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    if isinstance(budget, float):
        if total is None:
            raise OptionError(
                f"Option 'memory' is {budget}, a share of the device's memory.",
                f"Tensors are on {device.type}, whose memory has no limit.",
                _FIX,
            )
        return int(budget * total)
    if total is not None and budget > total:
        raise OptionError(
            f"Option 'memory' is {budget / 2**30:.1f} GiB.",
            f"{device} has {total / 2**30:.1f} GiB.",
            _FIX,
        )
    return int(budget)


def least_of_ranks(place: str, budget: int) -> int:
    """Return the least budget that a rank has, for the compile at a place in the program.

    A rank waits for the others as long as it waits for agreement on a graph. Where some do not
    come, the least of those that came counts, for those too that come later. It stays for as long
    as the job does. A program that compiles one function within several budgets has several
    agreements, by their order, which has to be that of all ranks. Raises CoordinationError if the
    job's store fails.
    """
    store, seconds, job = c10d.job_store(), deadline_s(), id(c10d.default_group())
    ranks = sorted({rank for members in c10d.real_groups().values() for rank in members})
    if store is None or len(ranks) < 2 or seconds == 0:
        return budget
    agreed_for = _agreed.setdefault((job, place), {})
    if budget not in agreed_for:
        key = f"memory/{len(agreed_for)}/{place}"
        steps = agree_on_least(key, c10d.global_rank(), ranks, budget)
        agreed_for[budget] = Coordination(store).run(steps, seconds)
    agreed = agreed_for[budget]
    if agreed != budget:
        log.warning(
            "The memory budget of this rank is %.2f GiB, and the ranks of the job have agreed on "
            "%.2f GiB for this function, which counts.",
            budget / 2**30,
            agreed / 2**30,
        )
    return agreed


# By job and place in the program, what ranks agreed on for each budget of this rank, in order. It
# lives as long as the process; another job has another key.
_agreed: dict[tuple[int, str], dict[int, int]] = {}


def agree_on_least(key: str, me: int, ranks: Sequence[int], budget: int) -> Steps[int]:
    """Agree on the least budget of those of ``ranks`` that come before the deadline."""
    decision = f"decision/{key}"
    yield from vote(key, me, str(budget))
    budgets = yield from gather(key, ranks)
    if budgets is None and not (yield from wait(decision, "agree on a memory budget", key, ranks)):
        missing = yield from missing_votes(key, ranks)
        budgets = yield from gather(key, set(ranks) - set(missing))
    if budgets is not None:
        yield from propose(decision, str(min(map(int, budgets.values()))))
    return int((yield from read(decision)))
