"""Traces of a run: events as JSON lines, log lines in the framework's format, pictures of plans."""

from megatron_recycle.observe.events import EventLog, read_events
from megatron_recycle.observe.log import get_logger

__all__ = ["EventLog", "get_logger", "read_events"]
