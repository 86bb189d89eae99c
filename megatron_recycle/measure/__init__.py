"""What is measured of a running job, and the costs that the planner gets: durations, noise, hops. Pure."""

from megatron_recycle.measure.durations import Profile, caps, drifted

__all__ = ["Profile", "caps", "drifted"]
