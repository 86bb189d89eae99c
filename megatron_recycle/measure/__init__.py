"""Measurements of a running job, and the costs that follow from them for the planner: durations, noise, hops. Pure."""

from megatron_recycle.measure.durations import Profile, caps, drifted

__all__ = ["Profile", "caps", "drifted"]
