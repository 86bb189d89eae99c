"""The control plane: the coordinator's process, and the agent in every worker. Sockets, clocks, threads and disk.

It executes `membership`'s decisions. Standard library, the plan, the planner, measured numbers and membership only.
"""

from megatron_recycle.control.agent import Agent
from megatron_recycle.control.clocks import Timeouts
from megatron_recycle.control.coordinator import Coordinator
from megatron_recycle.control.journal import Journal, JournalError, JournalInUse
from megatron_recycle.control.link import ask_record
from megatron_recycle.membership.protocol import End, Go, Stop, WireError

__all__ = ["Agent", "Coordinator", "End", "Go", "Journal", "JournalError", "JournalInUse", "Stop", "Timeouts",
           "WireError", "ask_record"]
