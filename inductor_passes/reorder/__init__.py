"""Passes that only move nodes."""

from inductor_passes.reorder.hoist_launches import HoistLaunches as HoistLaunches
from inductor_passes.reorder.sink_waits import SinkWaits as SinkWaits
