"""Order and costs of a graph -> timeline, exposed time, peak memory, Chrome trace."""

from inductor_passes.simulate.chrome_trace import chrome_trace
from inductor_passes.simulate.timeline import Timeline, simulate

__all__ = ["Timeline", "chrome_trace", "simulate"]
