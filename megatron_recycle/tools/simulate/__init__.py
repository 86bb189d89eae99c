"""Simulator of a job through a failure trace, by our decisions and by others' rules."""
