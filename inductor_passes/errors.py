"""Every failure of this package that a user can cause, each with what, why and how to fix."""

from __future__ import annotations


class ExplainedError(RuntimeError):
    """Base of both packages' errors. ``str()`` is one paragraph: what happened, why, and how to
    fix it.
    """

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(" ".join(part for part in (what, why, fix) if part))
        self.what = what
        self.why = why
        self.fix = fix


class PassesError(ExplainedError):
    """Base class of this package."""


class OptionError(PassesError, ValueError):
    """An option, a pass name or an option's value that we do not know."""


class TopologyError(PassesError, ValueError):
    """A topology file that is missing, unreadable, incomplete or physically impossible."""


class CalibrationError(PassesError):
    """A machine that cannot be measured: a device or a library is not there, or ranks did not
    come.
    """


class ProblemError(PassesError, ValueError):
    """A schedule problem that is not well formed, or a schedule that does not fit its problem."""


class PreconditionError(PassesError):
    """A graph that a pass cannot work on."""


class InvariantError(PassesError):
    """A pass broke a promise: names the pass, the node and, where known, the user's line."""


class PassFailedError(PassesError):
    """A pass raised or returned something that is not a ``PassStats``."""


class GroupError(PassesError):
    """A process group that does not exist, or that does not serve the tensors' device."""


class KernelError(PassesError):
    """A fused kernel that cannot run, or whose wait for a peer gave up."""


class RanksDifferError(PassesError):
    """Ranks of a group compiled graphs that do not go together.

    They launch different collectives on it, or would draw different numbers for replicas.
    """


class CannotFollowError(RanksDifferError):
    """This rank alone, after the job has run, got a graph that cannot launch as its peers'
    graphs do.
    """
