"""Decisions of the planner, from where they are made to whoever reports them."""

from __future__ import annotations

from dynamo_dist.reporting.records import PlanRecord
from inductor_passes.report.recorder import Subscribers

_subscribers: Subscribers[PlanRecord] = Subscribers()
# The one takes callbacks for every later plan, made or found again; the other hands a plan to them.
subscribe_to_plans, publish_plan = _subscribers.add, _subscribers.call
