"""One line for each graph that was scheduled: ``TORCH_LOGS="+inductor_passes.schedule"``."""

from __future__ import annotations

import logging

from inductor_passes.records import GraphRecord

log = logging.getLogger("inductor_passes.schedule")

_KEPT = {True: "order kept", False: "order NOT kept", None: "order not read"}


def log_schedule(record: GraphRecord) -> None:
    """Say what was decided on the graph; nothing where the global scheduler did not run."""
    schedule = record.schedule
    if schedule is None:
        return
    log.info(
        "%s: %d nodes, %d launches, %d buckets, makespan %.0f -> %.0f us, bound %.0f us, gap %.1f%%, "
        "peak %.1f -> %.1f MiB, %.2f s, %s, %s",
        record.graph_id,
        schedule.nodes,
        schedule.launches,
        schedule.buckets,
        schedule.makespan_before_us,
        schedule.makespan_after_us,
        schedule.bound_us,
        100 * schedule.gap,
        schedule.peak_before_bytes / 2**20,
        schedule.peak_after_bytes / 2**20,
        schedule.seconds,
        _KEPT[record.order_kept],
        schedule.decision,
    )
