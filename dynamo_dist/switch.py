"""The stack of changes that are in force: applied in order, undone last first, none half.

What is registered while the plugin is on comes on top of what ``enable()`` has put there.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dynamo_dist.errors import ActivationError
from dynamo_dist.torch_compat.patching import NotOursError

if TYPE_CHECKING:
    from dynamo_dist.torch_compat.patching import Patch

log = logging.getLogger(__name__)

_applied: list[Patch] = []


def is_enabled() -> bool:
    """Return whether ``enable()`` is in force in this process."""
    return bool(_applied)


def apply(patches: list[Patch]) -> None:
    """Apply more changes. Raises ActivationError if one fails, after undoing these; Ctrl-C
    undoes them too.
    """
    before = len(_applied)
    for patch in patches:
        try:
            patch.apply()
        except Exception as error:
            undo(before)
            raise ActivationError(
                f"enable() failed at {_describe(patch)}: {error!r}.",
                "This torch is not as we know it.",
                "Everything was restored. Report it with the output of: python -m dynamo_dist "
                "doctor",
            ) from error
        except BaseException:
            undo(before)
            raise
        _applied.append(patch)


def undo(down_to: int = 0) -> list[str]:
    """Undo all but the first ``down_to``, last first; the descriptions of those that failed, and
    why.
    """
    failures = []
    while len(_applied) > down_to:
        patch = _applied.pop()
        try:
            patch.undo()
        except NotOursError as error:
            failures.append(f"{_describe(patch)}, {error}")
        except Exception as error:
            failures.append(f"{_describe(patch)} ({error!r})")
    for failure in failures:
        log.warning("could not undo %s", failure)
    return failures


def _describe(patch: Patch) -> str:
    where = getattr(patch, "name", getattr(patch, "key", ""))
    return f"{type(patch).__name__}({where})" if where else type(patch).__name__
