"""Every failure of this package that a user can cause, each with what, why and how to fix."""

from __future__ import annotations

from inductor_passes.errors import CannotFollowError as CannotFollowError
from inductor_passes.errors import ExplainedError
from inductor_passes.errors import RanksDifferError as RanksDifferError


class DistError(ExplainedError):
    """Base class of this package."""


class UnsupportedTorchError(DistError):
    """This torch is older or newer than those we are tested with."""


class ActivationError(DistError):
    """A change in torch could not be made or undone; what had been changed was restored."""


class ConfigError(DistError, ValueError):
    """A value in the environment or in ``DistConfig`` that we do not know."""


class CompareError(DistError):
    """A comparison that cannot be made or cannot go on; names the rank that failed or is gone."""


class InFlightError(DistError):
    """A compiled program used a collective's buffer before waiting, or lost a Work."""


class DTensorError(DistError):
    """A compiled program did with a DTensor what cannot be done as eager does it."""


class DataParallelError(DistError, ValueError):
    """A gradient that an average in a graph cannot take."""


class ReportError(DistError, ValueError):
    """A report file that cannot be read, or that is none of this version."""


class PlanError(DistError):
    """A plan file that cannot be read, or a plan that does not fit the program."""


class StrategyError(DistError):
    """An operator that cannot run right on DTensors with these placements; names a way out."""


class VerifyError(DistError):
    """A model whose step cannot be compared with one device."""
